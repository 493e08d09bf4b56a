// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
	"github.com/podlace/podlace/pkg/reference"
)

// delReference removes the rules of an attachment without a record. The reference plugin wrote these rules, or Podlace wrote iptables rules
// in the same format. Most pods have no ports and therefore no record. Like the reference plugin, delReference looks for rules only if the
// runtime passes ports. The function also looks for rules if the last argument is true.
func delReference(r *plugin.Request, hadPorts bool) error {
	if !hadPorts && !passesPorts(r) {
		return nil
	}
	return asReference(r).Remove()
}

// passesPorts reports whether the runtime passes ports to DEL, even in an invalid form.
func passesPorts(r *plugin.Request) bool {
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

// madeByReference handles an attachment that has no record. The function returns the backend with which the reference plugin forwards the
// ports of the attachment. The result is "" if the reference plugin does not forward these ports. The iptables rules of the reference
// plugin are equal to ours, so madeByReference only checks that they exist.
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
