// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
)

// Rates returns the limits in a record of the plugin, in bits per second as the pod sees them; 0 for none.
func Rates(rec attachment.Record) (ingress, egress uint64, err error) {
	var st state
	err = json.Unmarshal(rec.State, &st)
	if st.Ingress != nil {
		ingress = st.Ingress.Rate
	}
	if st.Egress != nil {
		egress = st.Egress.Rate
	}
	return ingress, egress, err
}
