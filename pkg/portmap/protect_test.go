// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// changeLog is a log writer that calls a function after each change of the system.
type changeLog func(line string)

func (f changeLog) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(" msg=change ")) {
		f(string(line))
	}
	return len(line), nil
}

// runAdmin runs commands of an administrator, or skips the test if one is not installed.
func runAdmin(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		cmd := exec.Command("/bin/sh", "-c", c)
		cmd.Env = []string{"PATH=/usr/sbin:/sbin:/usr/bin:/bin"}
		out, err := cmd.CombinedOutput()
		if strings.Contains(string(out), "not found") {
			t.Skipf("SKIPPED: %s", out)
		}
		if err != nil {
			t.Fatalf("%s: %v: %s", c, err, out)
		}
	}
}

// ADD and Restore protect 127.0.0.0/8 from the pods before they enable route_localnet; DEL removes the protection last (S-07).
func TestProtectedThroughout(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		opened, after := []string{}, "" // links that were open at some time, and the flush before
		l.Stderr = changeLog(func(line string) {
			s, err := snapshot.Take(snapshot.Options{})
			if err != nil {
				l.Error(err)
				return
			}
			open := openTo127(s.String())
			if flag, err := os.ReadFile("/proc/sys/net/ipv4/conf/pt0/route_localnet"); err != nil || string(flag) != "0\n" && after == "" {
				open = append(open, "route_localnet")
			}
			opened = append(opened, open...)
			if protected := strings.Count(s.String(), "nft rule inet podlace_loopback ") >= 2; !protected && len(open) > 0 {
				l.Errorf("%sopen without protection: %q, after %s", after, open, line)
			}
		})
		second, _ := l.withName("second")
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("DEL", "a"))
		l.OK(l.Call("ADD", "a"))
		for what, repair := range map[string]func(){
			"STATUS": func() { l.OK(l.Call("STATUS", "")) },
			"ADD":    func() { l.OK(second.Call("ADD", "b", asking("10.71.0.6/24", port(9090, 90, "tcp"))...)) },
		} {
			if err := kerneltest.FlushNFT(); err != nil {
				t.Fatal(err)
			}
			after = "flushed, " + what + ": "
			repair()
			l.OK(l.Call("CHECK", "a"))
		}
		after = ""
		l.OK(l.Call("DEL", "b"))
		l.OK(l.Call("DEL", "a"))
		slices.Sort(opened)
		if opened = slices.Compact(opened); len(opened) != 2 {
			l.Errorf("links open at some time: %q", opened)
		}
	})
}

// Behind the link of the default route, a pod's network must not reach 127.0.0.1 of the node; 127.0.0.1 may reach a pod behind a bridge.
func TestNotOnUplink(t *testing.T) {
	eachBackend(t, func(l testLab) {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pt1"}, PeerName: "pt2"}
		if err := errors.Join(netlink.LinkAdd(veth), netlink.LinkSetUp(veth),
			netlink.LinkSetUp(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: "pt2"}}),
			netlink.AddrAdd(veth, &netlink.Addr{IPNet: kernel.IPNet(netip.MustParsePrefix("10.72.0.1/24"))})); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = netlink.LinkDel(veth) }()
		for link, c := range map[string]struct {
			pod, gateway string
			open         string
		}{"pt0": {"10.71.0.5/24", "10.71.0.7", "2\n"}, "pt1": {"10.72.0.5/24", "10.72.0.7", "0\n"}} {
			route := &netlink.Route{Gw: netip.MustParseAddr(c.gateway).AsSlice()}
			if err := netlink.RouteAdd(route); err != nil {
				t.Fatal(err)
			}
			l.OK(l.Call("ADD", "a", "prevResult", prevResult(c.pod)))
			if flag, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + link + "/route_localnet"); err != nil || string(flag) != c.open {
				t.Errorf("%s: route_localnet %q, %v", link, flag, err)
			}
			l.OK(l.Call("CHECK", "a", "prevResult", prevResult(c.pod)))
			l.OK(l.Call("DEL", "a"))
			if err := netlink.RouteDel(route); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// openTo127 returns the rules in a snapshot that send a connection for the node's 127.0.0.1 to a pod.
func openTo127(snapshot string) (open []string) {
	for _, rule := range []string{"nft element inet podlace_hostport ports4 ", "nft rule ip nat CNI-DN-"} {
		if strings.Contains(snapshot, rule) {
			open = append(open, rule)
		}
	}
	return open
}

// CHECK fails without the rules for pods on the same bridge or for 127.0.0.1, and without the element in "owners", through which DEL finds
// the ports if the record is lost (C-63).
func TestCheckDetectsReach(t *testing.T) {
	l := newLab(t)
	for command, says := range map[string]string{
		"nft flush set inet podlace_hostport hairpin":   "hairpin",
		"nft flush set inet podlace_hostport owners":    "owners",
		"sysctl -qw net.ipv4.conf.pt0.route_localnet=0": "route_localnet",
	} {
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a"))
		runAdmin(t, command)
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, says)
		if err := Restore(openHost(t), slog.Default()); err != nil {
			t.Error(err)
		}
		l.OK(l.Call("CHECK", "a"))
		l.OK(l.Call("DEL", "a"))
	}
}

// If records and rules are lost while route_localnet is on, the next ADD or DEL on that bridge restores the protection of 127.0.0.0/8, even
// for a pod without ports.
func TestProtectedAfterLossAndFlush(t *testing.T) {
	none := []any{"runtimeConfig", nil, "prevResult",
		object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "pt0"}, object{"name": "eth0", "sandbox": "/x"}},
			"ips": []any{object{"address": "10.71.0.7/24", "interface": 1}}}}
	for verb, call := range map[string]func(testLab){
		"STATUS": func(l testLab) { l.OK(l.Call("STATUS", "")) },
		"ADD":    func(l testLab) { l.OK(l.Call("ADD", "b", none...)) },
		"ADD with ports": func(l testLab) {
			one := object{"hostPort": 9000, "containerPort": 90, "protocol": "tcp", "hostIP": "10.71.0.1"}
			l.OK(l.Call("ADD", "b", append(none, "runtimeConfig", object{"portMappings": []any{one}})...))
		},
		"DEL": func(l testLab) { l.OK(l.Call("DEL", "b", none...)) },
		"GC":  func(l testLab) { l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{})) },
	} {
		t.Run(verb, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a"))
			entries, err := os.ReadDir(store.Root)
			for _, e := range entries {
				err = errors.Join(err, os.RemoveAll(filepath.Join(store.Root, e.Name())))
			}
			if err := errors.Join(err, kerneltest.FlushNFT()); err != nil {
				t.Fatal(err)
			}
			if !loopbackOpenedOn("pt0") {
				t.Fatal("127.0.0.1 is not open: this test shows nothing")
			}
			call(l)
			if ok, err := loopbackSchema().Intact(&openHost(t).NFT); err != nil || !ok && loopbackOpenedOn("pt0") {
				t.Errorf("open without protection, %v", err)
			}
			l.OK(l.Call("DEL", "b", none...))
			l.OK(l.Call("DEL", "a"))
		})
	}
}
