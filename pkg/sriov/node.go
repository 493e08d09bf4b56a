// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

const (
	// linkTimeout bounds the wait for an interface that the kernel returns from an ended namespace, or creates for a driver.
	linkTimeout = 5 * time.Second
	linkPoll    = 5 * time.Millisecond
)

// node is the namespace in which VFs are taken and returned, for one request.
type node struct {
	sysfs string
	host  *kernel.Node
	r     *plugin.Request
}

// openNode opens the namespace of the process. The caller closes the host.
func openNode(sysfs string, r *plugin.Request) (*node, error) {
	host, err := kernel.Host()
	return &node{sysfs: sysfs, host: host, r: r}, err
}

// card is a VF with its PF, and their interfaces if these are in the plugin's namespace.
type card struct {
	vf, pf pci.Device
	link   kernel.Link // Index is 0 if there is none
	pfLink kernel.Link // Index is 0 if there is none
}

// Userspace reports whether a driver passes the VF to a user space program, so that the VF has no interface.
func Userspace(driver string) bool {
	return slices.Contains([]string{"vfio-pci", "uio_pci_generic", "igb_uio"}, driver)
}

// userspace returns the VF's driver if it passes the VF to a user space program, or "".
func (c card) userspace() string {
	if Userspace(c.vf.Driver) {
		return c.vf.Driver
	}
	return ""
}

// read reads a VF, and its interface if that is on the node. The error is fs.ErrNotExist if the VF does not exist.
func (n *node) read(a pci.Address) (c card, err error) {
	if c.vf, c.pf, err = pci.Read(n.sysfs, a); err != nil {
		return c, err
	}
	if c.link, err = n.linkOnNode(c.vf); err != nil {
		return c, err
	}
	c.pfLink, err = n.linkOnNode(c.pf)
	return c, err
}

// linkOnNode returns the interface of a function if it is on the node. sysfs has its name, but another interface may have it as an
// alternative name.
func (n *node) linkOnNode(d pci.Device) (kernel.Link, error) {
	for _, name := range d.Interfaces {
		link, ok, err := n.host.Link(name)
		if err != nil || ok && link.Name == name && (link.Device == "" || link.Device == d.Address.String()) {
			return link, err
		}
	}
	return kernel.Link{}, nil
}

// settingsOnPF returns the VF's settings on its PF. ok is false if the PF is in another namespace, or if its driver does not report them.
func (n *node) settingsOnPF(c card) (vf kernel.VF, ok bool, err error) {
	if c.pfLink.Index == 0 || c.vf.VFIndex < 0 {
		return vf, false, nil
	}
	return n.host.VF(c.pfLink, c.vf.VFIndex)
}

// findInPod finds the interface of a journal's VF in the owner's namespace, by device. Kernels before Linux 5.14 do not report the device;
// then name and MAC identify it. alive reports whether the namespace exists; if so, the caller closes pod.
func findInPod(j journal) (pod *kernel.NS, link kernel.Link, alive bool, err error) {
	netns, err := plugin.OpenNetns(j.Netns)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, link, false, nil
	}
	if err != nil {
		return nil, link, false, fmt.Errorf("open the namespace %s of the pod: %w", j.Netns, err) // the namespace may exist
	}
	defer netns.Close()
	if pod, err = kernel.Open(netns); err != nil {
		return nil, link, false, err
	}
	link, ok, err := pod.LinkOf(j.Address.String())
	if err == nil && !ok && !j.DeviceReported {
		link, ok, err = pod.Link(j.Name)
		ok = ok && link.Device == "" && len(link.MAC) > 0 && (link.MAC.String() == j.MAC || bytes.Equal(link.MAC, j.Former.MAC))
	}
	if err != nil {
		pod.Close()
		return nil, link, false, err
	}
	if !ok {
		link = kernel.Link{}
	}
	return pod, link, true, nil
}

// awaitLink waits for the interface of a VF on the node. c.link.Index is 0 after a timeout.
func (n *node) awaitLink(a pci.Address) (c card, err error) {
	for end := time.Now().Add(linkTimeout); ; time.Sleep(linkPoll) {
		if c, err = n.read(a); err != nil || c.link.Index != 0 || time.Now().After(end) {
			return c, err
		}
	}
}

// rebind unbinds and binds the driver of a VF, which creates a new interface.
func (n *node) rebind(of card) (c card, err error) {
	a, ctx := of.vf.Address, context.Background()
	if err := pci.Unbind(ctx, n.sysfs, a); err != nil {
		return c, err
	}
	if err := pci.Bind(ctx, n.sysfs, a, of.vf.Driver); err != nil {
		return c, err
	}
	return n.awaitBound(a)
}

// awaitBound reads a VF whose driver has just changed, and waits for the interface of a network driver.
func (n *node) awaitBound(a pci.Address) (card, error) {
	c, err := n.read(a)
	if err != nil || c.vf.Driver == "" || c.userspace() != "" {
		return c, err
	}
	return n.awaitLink(a)
}

// setMAC changes the MAC of the interface. Some drivers accept only the MAC that the PF has set, and read it only while they are being
// bound.
func (n *node) setMAC(c card, mac net.HardwareAddr) (card, error) {
	if bytes.Equal(c.link.MAC, mac) {
		return c, nil
	}
	refused := n.host.SetMAC(c.link, mac)
	if refused == nil {
		c.link.MAC = mac
		return c, nil
	}
	n.r.Log.Info("the driver refuses the MAC; rebinding it", "vf", c.vf.Address, "driver", c.vf.Driver, "error", refused)
	c, err := n.rebind(c)
	if err == nil && c.link.Index == 0 {
		err = plugin.Errorf(plugin.CodeDevice, "VF %s has no interface after a rebind of driver %s", c.vf.Address, c.vf.Driver)
	}
	if err == nil && !bytes.Equal(c.link.MAC, mac) {
		err = n.host.SetMAC(c.link, mac)
	}
	if err != nil {
		return c, errors.Join(refused, err)
	}
	c.link.MAC = mac
	return c, nil
}

// isMissing reports whether an error means that the function does not exist.
func isMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
