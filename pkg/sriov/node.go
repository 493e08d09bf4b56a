// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

const (
	// linkTimeout limits the wait for a VF's interface on the node, where it appears when the pod's namespace ends or a driver creates
	// it.
	linkTimeout = 5 * time.Second
	linkPoll    = 5 * time.Millisecond
)

// nodeSide gives one request access to the node's network namespace, from which ADD takes VFs and to which DEL moves them back.
type nodeSide struct {
	sysfs string
	host  *kernel.Node
	r     *plugin.Request
}

// openNode opens the network namespace of the process. The caller must close `host` of the result.
func openNode(sysfs string, r *plugin.Request) (*nodeSide, error) {
	host, err := kernel.Host()
	return &nodeSide{sysfs: sysfs, host: host, r: r}, err
}

// vfCard is a VF and its PF, with those of their interfaces that are in the plugin's namespace.
type vfCard struct {
	vf, pf pci.Device
	link   kernel.Link // Index is 0 if there is none
	pfLink kernel.Link // Index is 0 if there is none
}

// userspaceDriver returns the VF's driver if that passes the VF to a user space program, or "".
func (c vfCard) userspaceDriver() string {
	if pci.IsUserspace(c.vf.Driver) {
		return c.vf.Driver
	}
	return ""
}

// readCard reads a VF, and its interface if that is on the node. It returns fs.ErrNotExist if the VF does not exist.
func (n *nodeSide) readCard(a pci.Address) (c vfCard, err error) {
	if c.vf, c.pf, err = pci.Read(n.sysfs, a); err != nil {
		return c, err
	}
	if c.link, err = n.linkOnNode(c.vf); err != nil {
		return c, err
	}
	c.pfLink, err = n.linkOnNode(c.pf)
	return c, err
}

// linkOnNode returns the interface of a function if it is on the node. It takes the name from sysfs, and ignores an interface that has
// this as an alternative name.
func (n *nodeSide) linkOnNode(d pci.Device) (kernel.Link, error) {
	for _, name := range d.Interfaces {
		link, ok, err := n.host.Link(name)
		if err != nil || ok && link.Name == name && (link.Device == "" || link.Device == d.Address.String()) {
			return link, err
		}
	}
	return kernel.Link{}, nil
}

// settingsOnPF returns the VF's settings on its PF; ok is false if the PF is in another namespace or its driver does not report them.
func (n *nodeSide) settingsOnPF(c vfCard) (vf kernel.VF, ok bool, err error) {
	if c.pfLink.Index == 0 || c.vf.VFIndex < 0 {
		return vf, false, nil
	}
	return n.host.VF(c.pfLink, c.vf.VFIndex)
}

// setOnPF sets a VF's settings on its PF. If the PF's driver refuses one, the error has a hint.
func (n *nodeSide) setOnPF(c vfCard, have, want kernel.VF) error {
	err := n.host.SetVF(c.pfLink, c.vf.VFIndex, have, want)
	if err == nil {
		return nil
	}
	code := plugin.Code(err)
	if errors.Is(err, syscall.EINVAL) {
		code = plugin.CodeDevice
	}
	refused := refusedSettings(err)
	hint := "it may not support the setting or its value"
	if strings.Contains(refused, "tx_rate") {
		hint += "; a rate must not exceed the speed of the link, and the link must be up"
	}
	return plugin.WithHint(plugin.Errorf(code, "%w", err), "the PF's driver %s refuses %s: %s", c.pf.Driver, refused, hint)
}

// refusedSettings lists the settings of all errors that SetVF has joined.
func refusedSettings(err error) string {
	var list []string
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		for _, e := range joined.Unwrap() {
			var refused *kernel.VFError
			if errors.As(e, &refused) {
				list = append(list, "'"+refused.Setting+"'")
			}
		}
	}
	return strings.Join(list, ", ")
}

// restoreOnPF sets a VF's former settings on its PF. Refused rates and a refused link state harm no pod, so their error is limitsErr. If
// the driver refuses to delete the MAC of the last pod, the VF gets mac instead, or a random one.
func (n *nodeSide) restoreOnPF(c vfCard, have, want kernel.VF, mac net.HardwareAddr) (limitsErr, err error) {
	other := want
	other.MinRate, other.MaxRate, other.LinkState = have.MinRate, have.MaxRate, have.LinkState
	err = n.setOnPF(c, have, other)
	if err != nil && isZero(want.MAC) {
		now, ok, e := n.settingsOnPF(c)
		if e == nil && ok && !isZero(now.MAC) {
			if other.MAC = mac; isZero(mac) {
				other.MAC = randomMAC(len(now.MAC))
			}
			n.r.Log.Warn("the PF's driver does not delete the VF's MAC; setting another", "vf", c.vf.Address, "mac", other.MAC, "error", err)
			err = n.setOnPF(c, now, other)
		}
	}
	want.MAC = other.MAC
	return n.setOnPF(c, other, want), err
}

// randomMAC returns a locally administered unicast MAC.
func randomMAC(length int) net.HardwareAddr {
	mac := make(net.HardwareAddr, length)
	_, _ = rand.Read(mac) // never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}

// isZero reports whether a MAC is empty or all zeros, which means none.
func isZero(mac net.HardwareAddr) bool { return bytes.Equal(mac, make([]byte, len(mac))) }

// findInPod finds the interface of a journal's VF in the pod's namespace by its PCI device, or by name and MAC on kernels before Linux
// 5.14, which do not report it. alive is true if the namespace exists; the caller must then close pod.
func findInPod(j Holding) (pod *kernel.NS, link kernel.Link, alive bool, err error) {
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

// awaitLink waits until the interface of a VF is on the node. If it is missing after linkTimeout, link.Index of the result is 0.
func (n *nodeSide) awaitLink(a pci.Address) (c vfCard, err error) {
	for end := time.Now().Add(linkTimeout); ; time.Sleep(linkPoll) {
		if c, err = n.readCard(a); err != nil || c.link.Index != 0 || time.Now().After(end) {
			return c, err
		}
	}
}

// rebind unbinds the driver of a VF and binds it again. A network driver then creates a new interface.
func (n *nodeSide) rebind(of vfCard) (c vfCard, err error) {
	a, ctx := of.vf.Address, context.Background()
	if err := pci.Bind(ctx, n.sysfs, a, ""); err != nil {
		return c, err
	}
	if err := pci.Bind(ctx, n.sysfs, a, of.vf.Driver); err != nil {
		return c, err
	}
	return n.awaitBound(a)
}

// awaitBound reads a VF after a change of its driver. If that is a network driver, it waits for the interface.
func (n *nodeSide) awaitBound(a pci.Address) (vfCard, error) {
	c, err := n.readCard(a)
	if err != nil || c.vf.Driver == "" || c.userspaceDriver() != "" {
		return c, err
	}
	return n.awaitLink(a)
}

// setMAC changes the MAC of the VF's interface. It may rebind the driver, because some accept only the MAC that is set on the PF and
// read it only when they are bound.
func (n *nodeSide) setMAC(c vfCard, mac net.HardwareAddr) (now vfCard, err error) {
	if bytes.Equal(c.link.MAC, mac) {
		return c, nil
	}
	if refused := n.host.SetMAC(c.link, mac); refused != nil {
		n.r.Log.Info("the driver refuses the MAC; rebinding it", "vf", c.vf.Address, "driver", c.vf.Driver, "error", refused)
		if c, err = n.rebind(c); err == nil && c.link.Index == 0 {
			err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s has no interface after a rebind of driver %s", c.vf.Address,
				c.vf.Driver), "'dmesg' says why; without a MAC from the configuration or the pod, the driver is not rebound")
		}
		if err == nil && !bytes.Equal(c.link.MAC, mac) {
			err = n.host.SetMAC(c.link, mac)
		}
		if err != nil {
			return c, errors.Join(refused, err)
		}
	}
	c.link.MAC = mac
	return c, nil
}

// isMissing reports whether the PCI function does not exist.
func isMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
