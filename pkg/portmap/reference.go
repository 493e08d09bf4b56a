// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
	"github.com/podlace/podlace/pkg/reference"
)

// delReference removes the rules of an attachment without a record, which the reference plugin or Podlace's iptables backend wrote. Most
// pods have no ports and so no record. Like the reference plugin, it therefore looks for rules only if the runtime passes ports to DEL, or
// if hadPorts is set.
func delReference(r *plugin.Request, hadPorts bool) error {
	if !hadPorts && !requestsPorts(r) {
		return nil
	}
	return asReference(r).Remove()
}

// requestsPorts reports whether the runtime passes ports to DEL, even an invalid list.
func requestsPorts(r *plugin.Request) bool {
	var conf struct {
		Runtime struct {
			Ports []any `json:"portMappings"`
		} `json:"runtimeConfig"`
	}
	return json.Unmarshal(r.Config, &conf) != nil || len(conf.Runtime.Ports) > 0
}

func asReference(r *plugin.Request) reference.Portmap {
	ref := reference.Unrecorded(attachment.KeyOf(r), r.Plugin)
	if r.Prev != nil {
		for _, p := range podAddresses(r.Prev, r.IfName) {
			ref.Addresses = append(ref.Addresses, p.Addr())
		}
	}
	return reference.Portmap(ref)
}

// madeByReference returns the backend with which the reference plugin forwards the ports of an attachment without a record, or "". Its
// iptables rules equal those of Podlace, so it is enough that they exist.
func madeByReference(r *plugin.Request, list []ports.Port) (backend string, err error) {
	if attachment.Recorded(r) {
		return "", nil
	}
	ref := asReference(r)
	all := len(list) > 0
	for _, p := range list {
		ok, err := ref.HasPort(p)
		if err != nil {
			return "", err
		}
		all = all && ok
	}
	if all {
		return "nftables", nil
	}
	if ok, err := ref.HasChain(); !ok || err != nil {
		return "", err
	}
	return "iptables", nil
}
