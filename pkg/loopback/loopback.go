// SPDX-License-Identifier: Apache-2.0

// Package loopback is the CNI plugin that brings up the interface lo of a pod. It has no configuration, and ignores CNI_IFNAME.
package loopback

import (
	"net/netip"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

const lo = "lo"

// loopbackAddresses returns the addresses that the kernel assigns to lo when it comes up (RFC 1122 section 3.2.1.3, RFC 4291 section
// 2.5.3).
func loopbackAddresses() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8"), netip.MustParsePrefix("::1/128")}
}

// Plugin returns the loopback plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "loopback", ForeignArgs: true, Add: add, Del: setLoDown, Check: check}
}

func add(r *plugin.Request) (*types100.Result, error) {
	var raw struct{}
	if err := r.Decode(&raw); err != nil {
		return nil, err
	}
	pod, link, err := open(r)
	if err != nil {
		return nil, err
	}
	defer pod.Close()
	if err := pod.SetUp(link); err != nil {
		return nil, err
	}
	if r.Prev != nil {
		return nil, nil
	}
	return loopbackResult(r, pod, link)
}

func open(r *plugin.Request) (*kernel.NS, kernel.Link, error) {
	pod, err := kernel.Open(r.Netns)
	if err != nil {
		return nil, kernel.Link{}, err
	}
	link, ok, err := pod.Link(lo)
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeDevice, "the pod has no interface lo")
	}
	if err != nil {
		pod.Close()
		return nil, kernel.Link{}, err
	}
	return pod, link, nil
}

// loopbackResult returns a result with lo and those of its addresses that are in loopbackAddresses; ::1 is missing in a pod without IPv6.
func loopbackResult(r *plugin.Request, pod *kernel.NS, link kernel.Link) (*types100.Result, error) {
	has, err := pod.Addresses(link)
	if err != nil {
		return nil, err
	}
	res := &types100.Result{Interfaces: []*types100.Interface{{Name: lo, Mac: "00:00:00:00:00:00", Sandbox: r.NetnsPath, Mtu: link.MTU}}}
	for _, p := range loopbackAddresses() {
		if slices.Contains(has, p) {
			res.IPs = append(res.IPs, &types100.IPConfig{Interface: types100.Int(0), Address: *kernel.IPNet(p)})
		}
	}
	if i := slices.IndexFunc(has, func(p netip.Prefix) bool { return !p.Addr().IsLoopback() }); i >= 0 {
		return nil, plugin.Differs("lo has the address %s, which is no loopback address", has[i])
	}
	return res, nil
}

// setLoDown sets lo down. It is a no-op if the namespace was deleted.
func setLoDown(r *plugin.Request) error {
	if r.Netns == nil {
		return nil
	}
	pod, link, err := open(r)
	if err != nil {
		return err
	}
	defer pod.Close()
	return pod.SetDown(link)
}

func check(r *plugin.Request) error {
	pod, link, err := open(r)
	if err != nil {
		return err
	}
	defer pod.Close()
	if !link.Up {
		return plugin.Differs("lo is down")
	}
	has, err := pod.Addresses(link)
	if err != nil {
		return err
	}
	for _, ip := range r.Prev.IPs {
		if want, ok := kernel.Prefix(&ip.Address); ok && want.Addr().IsLoopback() && !slices.Contains(has, want) {
			return plugin.Differs("lo lacks %s", want)
		}
	}
	return nil
}
