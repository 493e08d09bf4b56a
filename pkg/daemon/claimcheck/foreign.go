// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/strict"
)

// replaced contains the projects whose claims users bring along, by the domain of their attributes.
func replaced() map[string]string {
	return map[string]string{"dra.net": "dranet", "sriovnetwork.k8snetworkplumbingwg.io": "dra-driver-sriov",
		"sriovnetwork.openshift.io": "sriov-network-operator"}
}

// counterpart returns what to write instead of an attribute of these projects.
func counterpart(foreign string) (own attribute, ok bool) {
	for own, names := range map[string]string{
		"driver": "drivers devicetype", "kind": "issriovvf sriov", "linkType": "encapsulation linktype linktypes", "numa": "numanode",
		"pf": "ifname pfname pfnames netfilter", "pfAddress": "pfpciaddress parentpciaddress rootdevices",
		"product": "pcidevice deviceid devices", "rdma": "rdma rdmacapable isrdma rdmadevice", "resource": "resourcename",
		"vendor": "pcivendor vendor vendors", "vf": "vfid",
	} {
		if slices.Contains(strings.Fields(names), strings.ToLower(foreign)) {
			return attribute{claim.Driver, own}, true
		}
	}
	return attribute{"resource.kubernetes.io", "pciBusID"}, strings.HasPrefix(strings.ToLower(foreign), "pciaddress")
}

// unknown says what is wrong with an attribute that no device has, and what to write instead, in the form of write.
func (c *checker) unknown(a attribute, write func(attribute) string) string {
	instead, similar := counterpart(a.name)
	names := namesIn(c.own, strings.ToLower(a.domain))
	near := strict.Nearest(a.name, names)
	project := replaced()[strings.ToLower(a.domain)]
	switch {
	case similar && (project != "" || a.domain == claim.Driver):
		text := "no VF has this attribute: write " + write(instead)
		if project != "" {
			text = fmt.Sprintf("it is an attribute of %s: for VFs of Podlace write %s", project, write(instead))
		}
		return text + ", with values such as " + c.describe(instead)
	case near != "":
		return fmt.Sprintf("no VF has this attribute; did you mean %s?", attribute{strings.ToLower(a.domain), near})
	case project != "":
		return fmt.Sprintf("it is an attribute of %s without a counterpart: attributes of %s: %s", project, claim.Driver,
			strings.Join(namesIn(c.own, claim.Driver), ", "))
	case len(names) > 0 && a.domain == claim.Driver:
		return fmt.Sprintf("no VF has this attribute; attributes of %s: %s", claim.Driver, strings.Join(names, ", "))
	case isMisspeltDriver(a.domain):
		return "no driver has this name; did you mean " + claim.Driver + "?"
	}
	return "no VF has this attribute"
}

// isMisspeltDriver reports whether a name that is not the name of this driver resembles it.
func isMisspeltDriver(name string) bool {
	return name != claim.Driver && (strings.Contains(name, "podlace.") || strict.Nearest(name, []string{claim.Driver}) != "")
}
