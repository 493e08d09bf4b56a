// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
)

// HostSide is where an attachment is connected to the node.
type HostSide struct {
	Bridge    string
	Interface string // the end of the veth pair on the node
	MAC       string // of the pod's end, if antiSpoof or macspoofchk is set; else ""
}

// Describe returns the host side in a record of the plugin.
func Describe(rec attachment.Record) (h HostSide, err error) {
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil {
		return h, err
	}
	h = HostSide{Bridge: st.Bridge, Interface: attachment.HostVeth(rec.Hash())}
	if st.Guard != nil {
		h.Interface, h.MAC = st.Guard.Link, st.Guard.MAC
	}
	return h, nil
}
