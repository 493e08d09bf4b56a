// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/nft"
)

// HostSide is where an attachment is connected to the node.
type HostSide struct {
	Bridge    string
	Interface string // the end of the veth pair on the node
	MAC       string // of the pod's end, if antiSpoof or macspoofchk is set; else ""
}

// Describe returns the HostSide in a record of the bridge plugin.
func Describe(rec attachment.Record) (HostSide, error) {
	st, err := attachment.StateOf[state](rec)
	h := HostSide{Bridge: st.Bridge, Interface: rec.HostVeth()}
	if st.Guard.checksSources() {
		h.Interface, h.MAC = st.Guard.Link, st.Guard.MAC
	}
	return h, err
}

// Objects describes the kernel objects in an attachment's record, one per line.
func Objects(rec attachment.Record) ([]string, error) {
	st, err := attachment.StateOf[state](rec)
	if err != nil {
		return nil, err
	}
	h, err := Describe(rec)
	lines := []string{fmt.Sprintf("link %s, port of bridge %s; peer %s in the pod", h.Interface, st.Bridge, rec.IfName)}
	for _, a := range st.Addresses {
		lines = append(lines, fmt.Sprintf("address %s of %s", a, rec.IfName))
	}
	if st.Guard != nil {
		elements, err := st.Guard.elements()
		if err != nil {
			return lines, err
		}
		lines = append(lines, fmt.Sprintf("nft table %s: %d elements for %s and MAC %s", nft.GuardTable, len(elements), st.Guard.Link,
			st.Guard.MAC))
	}
	switch st.Masquerade {
	case "nftables":
		chain := MasqueradeSets{Network: rec.Network}.chainName()
		lines = append(lines, fmt.Sprintf("nft table %s: chain %s, which all pods of network %s share", nft.MasqueradeTable, chain, rec.Network))
	case "iptables":
		lines = append(lines, "iptables tables nat and mangle: chain "+masqueradeChain(rec.Key))
	}
	return lines, err
}
