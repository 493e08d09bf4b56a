// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
)

// Device returns the name of the ifb device in an attachment's record, or "" if there is none. The second result is true if the reference
// plugin uses the same name. In this case, the reference plugin's DEL deletes the ifb device.
func Device(rec attachment.Record) (name string, shared bool, err error) {
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil {
		return "", false, err
	}
	return st.IFB, rec.IfName == "eth0", nil
}
