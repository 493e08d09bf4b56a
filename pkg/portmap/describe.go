// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ports"
)

// Ports returns the hostPorts in a record of the plugin, in the order of the configuration. An attachment whose DEL has begun has none.
func Ports(rec attachment.Record) ([]ports.Port, error) {
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil || st.Ended {
		return nil, err
	}
	return st.Ports, nil
}
