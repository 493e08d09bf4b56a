// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// Ports returns the hostPorts in a portmap record in the order of the configuration, or none once a DEL has begun.
func Ports(rec attachment.Record) ([]ports.Port, error) {
	st, err := attachment.StateOf[portState](rec)
	if err != nil || st.Ended {
		return nil, err
	}
	return st.Ports, nil
}

// Objects returns one line for each rule of the record's hostPorts.
func Objects(rec attachment.Record) (lines []string, err error) {
	st, err := attachment.StateOf[portState](rec)
	if err != nil || st.Ended {
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
