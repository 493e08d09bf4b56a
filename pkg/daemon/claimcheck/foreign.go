// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/strict"
)

// replaced contains the projects whose claims users bring along, by the domain of their attributes.
func replaced() map[string]string {
	return map[string]string{"dra.net": "dranet", "sriovnetwork.k8snetworkplumbingwg.io": "dra-driver-sriov",
		"sriovnetwork.openshift.io": "sriov-network-operator"}
}

// synonyms contains, for names of these projects in lower case, what to write instead.
func synonyms() map[string]attribute {
	own := func(name string) attribute { return attribute{claim.Driver, name} }
	bus := attribute{"resource.kubernetes.io", "pciBusID"}
	return map[string]attribute{"ifname": own("pf"), "pfname": own("pf"), "pfnames": own("pf"), "netfilter": own("pf"), "pciaddress": bus,
		"pciaddresses": bus, "pfpciaddress": own("pfAddress"), "parentpciaddress": own("pfAddress"), "rootdevices": own("pfAddress"),
		"pcivendor": own("vendor"), "vendor": own("vendor"), "vendors": own("vendor"), "pcidevice": own("product"), "deviceid": own("product"),
		"devices": own("product"), "vfid": own("vf"), "resourcename": own("resource"), "encapsulation": own("linkType"),
		"linktype": own("linkType"), "linktypes": own("linkType"), "rdma": own("rdma"), "rdmadevice": own("rdma"), "rdmacapable": own("rdma"), "isrdma": own("rdma"),
		"issriovvf": own("kind"), "sriov": own("kind"), "drivers": own("driver"), "devicetype": own("driver"), "numanode": own("numa")}
}

// unknown says what is wrong with an attribute that no device has, and what to write instead.
func (c *checker) unknown(a attribute) string {
	instead, similar := synonyms()[strings.ToLower(a.name)]
	names := namesIn(c.own, strings.ToLower(a.domain))
	near := strict.Nearest(a.name, names)
	project := replaced()[strings.ToLower(a.domain)]
	switch {
	case similar && (project != "" || a.domain == claim.Driver && near == ""):
		text := "no VF has this attribute: write " + instead.expression()
		if project != "" {
			text = fmt.Sprintf("it is an attribute of %s: for VFs of Podlace write %s", project, instead.expression())
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
