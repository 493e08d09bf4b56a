// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// lacksHostPorts reports whether the kernel lacks a rule or an element that restoreHostPorts writes for the attachments. A kernel without
// nftables lacks nothing that could be restored.
func lacksHostPorts(host *kernel.Node, all []owned) (bool, error) {
	if ok, err := rulesIntact(host); err != nil || !ok {
		return !ok && err == nil, nft.IgnoreUnsupported(err)
	}
	var want []nft.Element
	for _, h := range all {
		want = append(want, h.elements()...)
		if h.Bridge != "" && !h.Taken {
			want = append(want, hairpin(h.Bridge))
		}
	}
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return false, err
	}
	want = once(want)
	has, err := t.Existing(want)
	return len(has) < len(want), err
}
