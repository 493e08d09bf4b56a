// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/nft"
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

// Objects returns the rules of an attachment's hostPorts by its record, one line each.
func Objects(rec attachment.Record) (lines []string, err error) {
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil || st.Ended {
		return nil, err
	}
	table := "nft table " + nft.HostportTable + ": "
	if st.Backend == "iptables" {
		lines, table = append(lines, "iptables table nat: chain "+podChain(rec.Key)), table+"reservation of "
	}
	for _, p := range st.Ports {
		lines = append(lines, fmt.Sprintf("%shostPort %s to %s", table, p, p.To))
	}
	return lines, nil
}
