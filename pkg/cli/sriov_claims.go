// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// sriovClaim is one device of a ResourceClaim that was prepared on this node.
type sriovClaim struct {
	Claim     string      `json:"claim"` // namespace/name
	UID       string      `json:"uid"`
	Request   string      `json:"request"`
	State     claim.State `json:"state"`
	Device    string      `json:"device"` // its PCI address
	Resource  string      `json:"resource"`
	Admin     bool        `json:"admin,omitempty"`
	Settings  string      `json:"settings,omitempty"`  // merged from class and claim
	Pod       string      `json:"pod,omitempty"`       // namespace/name; "" while several pods may use the claim
	Interface string      `json:"interface,omitempty"` // interface name in that pod, after the VF was attached
}

// readClaims returns the devices of all prepared claims, sorted by claim and request.
func (f *sriovFlags) readClaims() (list []sriovClaim, err error) {
	records, recordErr := claim.List(f.claims)
	attached, journalErr := sriov.Holdings()
	for _, r := range records {
		devices := slices.Clone(r.Devices)
		slices.SortStableFunc(devices, func(a, b poddevices.Device) int { return a.Claim.Result - b.Claim.Result })
		for _, d := range devices {
			list = append(list, deviceOf(r, d, attached))
		}
	}
	return addUnrecorded(list, attached), errors.Join(recordErr, journalErr)
}

// addUnrecorded adds the VFs that pods have through claims without a readable record, so that no VF of a pod is listed as free. The daemon
// restores a missing record within some seconds.
func addUnrecorded(list []sriovClaim, attached []sriov.Holding) []sriovClaim {
	for _, a := range attached {
		same := func(c sriovClaim) bool { return c.Device == a.Address.String() && c.UID == a.Claim.UID }
		if a.Claim != nil && !slices.ContainsFunc(list, same) {
			list = append(list, sriovClaim{Claim: a.Claim.Namespace + "/" + a.Claim.Name, UID: a.Claim.UID, Request: a.Claim.Request,
				State: "no record", Device: a.Address.String(), Pod: a.Pod, Interface: a.Name})
		}
	}
	return list
}

// deviceOf converts one device of a claim's record. Several pods may use a claim, so it reads the VF's pod from the VF's journal.
func deviceOf(r claim.Record, d poddevices.Device, attached []sriov.Holding) sriovClaim {
	c := sriovClaim{Claim: d.Claim.Namespace + "/" + d.Claim.Name, UID: d.Claim.UID, Request: d.Claim.Request, State: r.State, Device: d.ID,
		Resource: d.Resource, Admin: d.Claim.Admin, Settings: d.Config.String()}
	if pod := r.Pod(); pod != "" {
		c.Pod = d.Claim.Namespace + "/" + pod
	}
	for _, a := range attached {
		if a.Address.String() == d.ID && a.Claim != nil && a.Claim.UID == d.Claim.UID && !c.Admin {
			c.Pod, c.Interface = a.Pod, a.Name
		}
	}
	return c
}

// addClaimed adds the devices of claims to n.held, except those that the device plugin listed.
func (n *sriovNode) addClaimed() {
	for _, c := range n.claims {
		if _, known := n.held[c.Device]; !known && !c.Admin {
			namespace, name, _ := strings.Cut(c.Claim, "/")
			n.held[c.Device] = poddevices.Device{ID: c.Device, Resource: c.Resource,
				Claim: &poddevices.Claim{UID: c.UID, Namespace: namespace, Name: name, Request: c.Request}}
		}
	}
}

func (n *sriovNode) claimsOf(a pci.Address) []sriovClaim {
	return slices.DeleteFunc(slices.Clone(n.claims), func(c sriovClaim) bool { return c.Device != a.String() })
}

// holder returns the pod that uses a device, or the claim while its pod is unknown.
func (n *sriovNode) holder(h poddevices.Device) string {
	if h.Claim == nil || h.Pod != "" {
		return h.Namespace + "/" + h.Pod
	}
	for _, c := range n.claims {
		if c.Device == h.ID && c.UID == h.Claim.UID && c.Pod != "" {
			return c.Pod
		}
	}
	return "claim " + h.Claim.Namespace + "/" + h.Claim.Name
}

func (n *sriovNode) describeOwner(h poddevices.Device) string {
	who := plain(n.holder(h))
	if !strings.HasPrefix(who, "claim ") {
		who = "pod " + who
	}
	return who + " has it"
}

// describe formats a claim's device as one line.
func (c sriovClaim) describe() string {
	where := "no pod has it attached yet"
	switch {
	case c.Admin:
		where = "admin access: the VF is not moved"
	case c.Interface != "":
		where = fmt.Sprintf("it is %s of pod %s", plain(c.Interface), plain(c.Pod))
	case c.State == claim.Preparing:
		where = "it is being prepared"
	}
	if c.Settings != "" {
		where += "; settings: " + plainText(c.Settings)
	}
	return fmt.Sprintf("claim %s, request %s, has it as %s; %s", plain(c.Claim), plain(c.Request), cmp.Or(plain(c.Resource), "a VF of an unknown resource"), where)
}

// listClaims prints a table of the prepared claims, if there are any.
func (n *sriovNode) listClaims(stdout io.Writer) {
	if len(n.claims) == 0 {
		return
	}
	rows := [][]string{{"\nCLAIM", "REQUEST", "POD", "DEVICE", "INTERFACE", "RESOURCE", "STATE", "SETTINGS"}}
	for _, c := range n.claims {
		name := c.Interface
		if c.Admin {
			name = "admin"
		}
		rows = append(rows, []string{plain(c.Claim), plain(c.Request), dash(plain(c.Pod)), c.Device, dash(plain(name)),
			dash(plain(c.Resource)), string(c.State), dash(plainText(c.Settings))})
	}
	printTable(stdout, rows)
}

// byDRA reports whether the configuration offers a resource through Dynamic Resource Allocation (DRA).
func (n *sriovNode) byDRA(resource string) bool {
	return slices.ContainsFunc(n.config.Resources, func(r pool.Resource) bool { return r.FullName() == resource && r.API == pool.DRA })
}

// printPublished prints what the ResourceSlices say about a device, and the attributes that only other devices have, because a CEL
// expression fails if it reads a missing one without a test.
func (n *sriovNode) printPublished(w io.Writer, e pool.Explanation) {
	p, ok := n.slices[e.Device.String()]
	switch {
	case ok:
		fmt.Fprintf(w, "  by DRA: device %s of pool %s\n", plain(p.Device), plain(p.Pool))
	case n.pluginErr != nil && n.byDRA(e.Resource):
		fmt.Fprintf(w, "  by DRA; its attributes and taints are unknown: %s\n", plainText(n.pluginErr.Error()))
		return
	case n.byDRA(e.Resource):
		fmt.Fprintln(w, "  by DRA, but in no ResourceSlice at present")
		return
	default:
		return
	}
	var rows [][]string
	for _, name := range slices.Sorted(maps.Keys(p.Attributes)) {
		rows = append(rows, []string{"    " + plain(name), dash(plain(p.Attributes[name]))})
	}
	printTable(w, rows)
	for _, name := range n.missingAttributes(p) {
		fmt.Fprintf(w, "    it lacks %s, which other devices have: a CEL expression must test for it first\n", plain(name))
	}
	for _, taint := range p.Taints {
		fmt.Fprintf(w, "    taint %s\n", plain(taint))
	}
}

// missingAttributes returns the attributes that other devices of the node have and this one lacks.
func (n *sriovNode) missingAttributes(p poddevices.Published) []string {
	missing := map[string]bool{}
	for _, other := range n.slices {
		for name := range other.Attributes {
			if _, ok := p.Attributes[name]; !ok {
				missing[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(missing))
}
