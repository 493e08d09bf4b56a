// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
)

func TestAddTells(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			n := newNode(t, "add-"+backend[:3], 150+i, backend)
			h := n.attach("add")
			t.Run("C-36 every interface with MAC, MTU and sandbox", func(t *testing.T) { h.checkLinks(t) })
			t.Run("C-37 index of the interface, gateway inside the subnet", func(t *testing.T) { sameAddresses(t, h) })
			h.delChain()
		})
	}
}

// checkLinks checks that the result contains exactly the bridge, both ends of the veth pair and the ifb device.
func (h attachedPod) checkLinks(t *testing.T) {
	t.Helper()
	if len(h.result.Interfaces) != 4 {
		t.Fatalf("%d interfaces, want the bridge, two ends and the ifb: %s", len(h.result.Interfaces), h.prev)
	}
	kinds := []string{"bridge", "veth", "veth", "ifb"}
	for i, told := range h.result.Interfaces {
		sandbox := ""
		look := onHost
		if i == 2 {
			sandbox = h.pod.Path
			look = func(name string, f func(netlink.Link) error) error { return h.inPod(f) }
		}
		err := look(told.Name, func(l netlink.Link) error {
			if l.Type() != kinds[i] || l.Attrs().HardwareAddr.String() != told.Mac || l.Attrs().MTU != told.Mtu || told.Sandbox != sandbox {
				return fmt.Errorf("the result describes a %s with MAC %s and MTU %d", l.Type(), l.Attrs().HardwareAddr, l.Attrs().MTU)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%+v: %v", *told, err)
		}
	}
}

func sameAddresses(t *testing.T, h attachedPod) {
	t.Helper()
	var told []string
	for _, ip := range h.result.IPs {
		if ip.Interface == nil || *ip.Interface != 2 {
			t.Errorf("%s does not belong to the third interface", ip.Address.String())
		}
		subnet := net.IPNet{IP: ip.Address.IP.Mask(ip.Address.Mask), Mask: ip.Address.Mask}
		if !subnet.Contains(ip.Gateway) || ip.Gateway.Equal(ip.Address.IP) {
			t.Errorf("gateway %s of %s", ip.Gateway, ip.Address.String())
		}
		told = append(told, ip.Address.String())
	}
	err := h.inPod(func(l netlink.Link) error {
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		var has []string
		for _, a := range addrs {
			if !a.IP.IsLinkLocalUnicast() {
				has = append(has, a.IPNet.String())
			}
		}
		if len(told) != 2 || !slices.Equal(has, told) {
			t.Errorf("the pod has %v, the result has %v", has, told)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// liveRoutes returns routes for the result of ADD that use every attribute a route can have.
func liveRoutes() []any {
	return []any{
		object{"dst": "192.0.2.0/24", "mtu": 1300, "advmss": 1200, "priority": 77},
		object{"dst": "198.51.100.0/24", "scope": 253, "table": 140},
		object{"dst": "2001:db8:1::/48", "mtu": 1310, "advmss": 1210, "priority": 78},
	}
}

// TestAddLive checks that the interfaces, addresses and routes of the result are usable when ADD returns.
func TestAddLive(t *testing.T) {
	n := newNode(t, "live", 152, "nftables")
	n = n.withKeys(0, "ipam.routes", liveRoutes())
	t.Run("C-38 links, addresses and routes are live", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("live")
		defer h.delChain()
		err := h.inPod(func(l netlink.Link) error {
			if l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().OperState != netlink.OperUp {
				t.Errorf("flags %s, state %s", l.Attrs().Flags, l.Attrs().OperState)
			}
			addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
			for _, a := range addrs {
				if a.Flags&0x48 != 0 { // IFA_F_TENTATIVE, IFA_F_DADFAILED
					t.Errorf("%s has flags %x", a.IPNet, a.Flags)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range h.result.Routes {
			h.checkRoute(t, r.Dst, netlink.Route{MTU: r.MTU, AdvMSS: r.AdvMSS, Priority: r.Priority})
		}
		if len(h.result.Routes) != 5 {
			t.Errorf("%d routes in the result, want 5", len(h.result.Routes))
		}
		h.checkRoute(t, h.result.Routes[0].Dst, netlink.Route{MTU: 1300, AdvMSS: 1200, Priority: 77})
	})
}

// checkRoute checks that the pod has a route with the wanted attributes.
func (h attachedPod) checkRoute(t *testing.T, dst net.IPNet, want netlink.Route) {
	t.Helper()
	err := h.inPod(func(l netlink.Link) error {
		filter := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: &dst}
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST)
		if err == nil && dst.String() == "198.51.100.0/24" {
			filter.Table = 140
			routes, err = netlink.RouteListFiltered(netlink.FAMILY_V4, filter, netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
			if len(routes) == 1 && routes[0].Scope != 253 {
				t.Errorf("%s has scope %d", dst.String(), routes[0].Scope)
			}
		}
		if err != nil || len(routes) != 1 {
			return fmt.Errorf("%s: routes %v, %v", dst.String(), routes, err)
		}
		if r := routes[0]; r.MTU != want.MTU || r.AdvMSS != want.AdvMSS || want.Priority != 0 && r.Priority != want.Priority {
			t.Errorf("%s is %+v, want %+v", dst.String(), r, want)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestAddTwice runs eight parallel ADDs of the same attachment.
func TestAddTwice(t *testing.T) {
	n := newNode(t, "twice", 153, "nftables")
	given := object{"runtimeConfig": object{"ips": []any{"10.153.7.7/16"}}}
	for title, edit := range harness.InOrder(map[string]object{"": {}, ", address given": given}) {
		for _, plugin := range []string{"bridge", "host-local"} {
			t.Run("C-40 ADD of "+plugin+" eight times at once"+title, func(t *testing.T) {
				n := n.inSubtest(t)
				before := harness.Watch(t)
				h := attachedPod{testNode: n, pod: harness.NewPod(t, "twice"), ifname: "eth0"}
				add := h.callOf(0, "ADD")
				add.Plugin = plugin
				for key, value := range edit {
					add = editedKeys(key, value)(add)
				}
				winner := addParallel(t, add)
				check := editedKeys("prevResult", harness.RawObject(t, winner))(add).With("CNI_COMMAND", "CHECK")
				check.Run(t).OK(t)
				add.With("CNI_COMMAND", "DEL").Run(t).OK(t)
				before.Clean(t, "DEL")
			})
		}
	}
}

// addParallel runs an ADD eight times in parallel, of which exactly one must succeed, and returns its result.
func addParallel(t *testing.T, add harness.Call) (result string) {
	t.Helper()
	outs := make([]harness.Outcome, 8)
	errs := make([]error, 8)
	var wait sync.WaitGroup
	for i := range outs {
		wait.Go(func() { outs[i], errs[i] = add.Start() })
	}
	wait.Wait()
	for i, o := range outs {
		switch {
		case errs[i] != nil:
			t.Fatal(errs[i])
		case o.Exit == 0 && result == "":
			result = o.OK(t).Stdout
		case o.Exit == 0:
			t.Errorf("two calls succeeded: %s and %s", result, o.Stdout)
		default:
			o.Refused(t, 102)
		}
	}
	if !strings.Contains(result, "10.153.") {
		t.Fatalf("no call worked: %s", outs[0].Stdout)
	}
	return result
}
