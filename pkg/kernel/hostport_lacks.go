// SPDX-License-Identifier: Apache-2.0

package kernel

// LacksHostPorts reports whether the kernel lacks a rule or an element that RestoreHostPorts writes for the attachments. A kernel without
// nftables lacks nothing that could be restored.
func (n *Node) LacksHostPorts(all []HostPorts) (bool, error) {
	if ok, err := n.HostPortRules(); err != nil || !ok {
		return !ok && err == nil, ignoreNoNFT(err)
	}
	var want []element
	for _, h := range all {
		want = append(want, h.elements()...)
		if h.Bridge != "" && !h.Taken {
			want = append(want, hairpin(h.Bridge))
		}
	}
	t, err := n.openNFT(hostportTable)
	if err != nil {
		return false, err
	}
	want = once(want)
	has, err := t.existing(want)
	return len(has) < len(want), err
}
