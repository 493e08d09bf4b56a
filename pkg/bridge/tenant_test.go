// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// forge replaces the pod's eth0 by one end of a new veth pair inside the pod, which has the ifindexes of the victim's pair. The new eth0
// gets the MAC, addresses and routes of the pod's ADD result.
func (a attached) forge(victim attached) error {
	host, err := netlink.LinkByName(victim.hostVeth())
	if err != nil {
		return err
	}
	return a.Pod.Do(func() error {
		own, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		mac := own.Attrs().HardwareAddr
		if err := errors.Join(netlink.LinkDel(own),
			kerneltest.ForgePair("veth", "eth0", host.Attrs().ParentIndex, "q", host.Attrs().Index)); err != nil {
			return err
		}
		var errs []error
		for name, mac := range map[string]net.HardwareAddr{"eth0": mac, "q": nil} {
			link, err := netlink.LinkByName(name)
			if errs = append(errs, err); err == nil && mac != nil {
				errs = append(errs, netlink.LinkSetHardwareAddr(link, mac))
			}
			errs = append(errs, netlink.LinkSetUp(link))
		}
		link, err := netlink.LinkByName("eth0")
		if err := errors.Join(append(errs, err)...); err != nil {
			return err
		}
		for _, ip := range a.result.IPs {
			errs = append(errs, netlink.AddrAdd(link, &netlink.Addr{IPNet: &ip.Address, Flags: unix.IFA_F_NODAD}),
				netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: ip.Gateway}))
		}
		return errors.Join(errs...)
	})
}

// TestForgedPeer (C-50, C-61): if a tenant's interface has the ifindexes of another pod's pair, CHECK reports that the host side is
// missing, and DEL, with and without a record, leaves the other pod alone.
func TestForgedPeer(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	victim, tenant := l.add("victim"), l.other().add("tenant")
	l.OK(tenant.check())
	if err := tenant.forge(victim); err != nil {
		t.Fatal(err)
	}
	l.Fails(tenant.check(), plugin.CodeStateDiffers, "the host side of eth0 is missing")
	l.OK(victim.check())
	tenant.loseRecord()
	l.OK(tenant.Call("DEL", "tenant", "prevResult", tenant.prev))
	l.OK(victim.check())
}

// TestLostRecordAfterFlush: CHECK fails for a pod whose record and rules were lost, if its port's flags show that it was guarded. No CNI
// operation can restore the protection without the record.
func TestLostRecordAfterFlush(t *testing.T) {
	l := bareLab(t, "name", "both", "bridge", "btlost", "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btlost", netlink.LinkDel) })
	a := l.add("a")
	a.loseRecord()
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	l.OK(l.Call("STATUS", ""))
	l.Fails(a.check(), plugin.CodeStateDiffers, "the record of bridge is missing")
}
