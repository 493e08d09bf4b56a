// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// checkUsable returns an error for a function that no pod may use. A claim may also have a PF without VFs. A function that is neither VF
// nor PF may be anything, so the node must not use it in any way.
func (n *nodeSide) checkUsable(c vfCard, byClaim bool) error {
	refuse := func(hint, format string, args ...any) error {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "PCI function %s "+format, append([]any{c.vf.Address}, args...)...), "%s", hint)
	}
	const inUse = "take the interface out of use there, or exclude the VF by the selectors of its resource"
	why, remedy := Refusal(c.vf, c.pf)
	kind, used, err := n.lookCloser(c)
	if err != nil {
		return err
	}
	switch upper := n.upperLink(c); {
	case kind.IsPF() && (!byClaim || kind.NumVFs > 0):
		return refuse("pods do not get a PF: numVfs in the device plugin's configuration creates VFs", "is not a VF of this node")
	case why != "":
		return refuse(remedy, "is refused: %s", why)
	case c.link.Index != 0 && plugin.ValidIfName(c.link.Name) != nil:
		return refuse("rename it with 'ip link set'", "has an interface whose name could not be restored: %q", c.link.Name)
	case c.link.Master != 0:
		return refuse(inUse, "is in use on the node: %s is a port of %s", c.link.Name, cmp.Or(upper, "another interface"))
	case upper != "":
		return refuse(inUse, "is in use on the node: %s is the lower interface of %s", c.link.Name, upper)
	case c.link.Up && n.host.IsUplink(c.link):
		return refuse(inUse, "is in use on the node: %s carries the default route", c.link.Name)
	case used != "":
		return refuse(inUse, "is in use on the node: %s", strings.TrimSpace(c.link.Name+" "+used))
	}
	return nil
}

// lookCloser reads of a function that is no VF whether it is a PF and, if not, why the node itself uses it.
func (n *nodeSide) lookCloser(c vfCard) (d pci.Device, used string, err error) {
	if c.vf.IsVF() {
		return c.vf, "", nil
	}
	if d, err = pci.Inspect(n.sysfs, c.vf.Address); err != nil || d.IsPF() {
		return d, "", err
	}
	if d.Unreadable != "" { // it may be a PF
		return d, "cannot be read: " + d.Unreadable, nil
	}
	if d.IsVirtio() {
		return d, "is of a virtio card, which the kernel does not name in a pod", nil
	}
	if c.link.Index == 0 && d.Driver != "" && !pci.IsUserspace(d.Driver) {
		return d, "its interface is in another network namespace", nil
	}
	all, err := n.host.InUse()
	return d, all[c.link.Name], err
}

// upperLink returns an interface on top of the VF's, such as a macvlan, or "".
func (n *nodeSide) upperLink(c vfCard) string {
	if c.link.Index == 0 {
		return ""
	}
	found, _ := filepath.Glob(filepath.Join(n.sysfs, "bus/pci/devices", c.vf.Address.String(), "net", c.link.Name, "upper_*"))
	if len(found) == 0 {
		return ""
	}
	return strings.TrimPrefix(filepath.Base(found[0]), "upper_")
}
