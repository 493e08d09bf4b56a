// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestFaultBridge changes or deletes running pods' bridge, as other programs do.
func TestFaultBridge(t *testing.T) {
	t.Run("F-23 bridge deleted beneath pods with traffic", testBridgeDeleted)
	t.Run("F-23 bridge deleted at any point of another ADD", func(t *testing.T) {
		s := newSweep(t, "nftables")
		s.atEveryPoint(t, "ADD", "ip link del chain0", func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
			_, err := s.Do("DEL", rt, nil)
			return errors.Join(err, pod.Close(), s.attachAgain())
		})
	})
	t.Run("F-24 bridge and ports changed", testBridgeChanged)
	t.Run("F-25 somebody sets MACs that the kernel chose", testMACPolicy)
	t.Run("F-26 sysctls reset", testSysctlsReset)
}

// testBridgeDeleted: CHECK reports the missing bridge, and the next ADD restores the connections and hostPorts of all pods.
func testBridgeDeleted(t *testing.T) {
	s := newSweep(t, "nftables")
	web, client := harness.NewPod(t, "web"), harness.NewPod(t, "client")
	rtWeb, rtClient := harness.Attachment(web, "web", harness.Capabilities()), harness.Attachment(client, "client", harness.Capabilities())
	rtClient.CapabilityArgs["portMappings"] = []any{object{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}}
	before := harness.Watch(t, s.stays)
	ips := harness.Addresses(t, s.Must(t, "ADD", rtWeb))
	server, err := harness.Serve(web, 80)
	if err != nil {
		t.Fatal(err)
	}
	harness.Reach(t, nil, ips[0]+":80", web)
	harness.Reach(t, s.stays, "["+ips[1]+"]:80", web)
	harness.Shell(t, "ip link del chain0")
	s.Points++
	var differs *types.Error
	for _, rt := range []*libcni.RuntimeConf{rtWeb, harness.Attachment(s.stays, "stays", nil)} {
		if _, err := s.Do("CHECK", rt, nil); !errors.As(err, &differs) || differs.Code != harness.CodeDiffers {
			t.Errorf("CHECK of %s without its bridge: %v", rt.ContainerID, err)
		}
	}
	s.Must(t, "ADD", rtClient)
	s.Next++
	s.Must(t, "CHECK", rtWeb)
	s.Must(t, "CHECK", harness.Attachment(s.stays, "stays", nil))
	harness.Reach(t, s.stays, ips[0]+":80", web)
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	harness.ChainTraffic(t, web, client, ips)
	s.Must(t, "DEL", rtClient)
	s.Must(t, "DEL", rtWeb)
	before.Clean(t, "the bridge was restored, but the pods are not connected")
	s.Report(t)
}

// testBridgeChanged: CHECK reports each difference. The next ADD either repairs the shared settings, or fails and leaves no state. Running
// pods keep their connections.
func testBridgeChanged(t *testing.T) {
	s := newSweep(t, "nftables")
	result, err := s.Do("ADD", harness.Attachment(harness.NewPod(t, "one"), "one", nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Must(t, "DEL", harness.Attachment(&sandbox.Pod{}, "one", nil))
	port := hostVethOf(t, result)
	for title, c := range harness.InOrder(map[string]struct {
		breaks, mends string // the command in mends restores the settings that the next ADD does not repair
		told          bool   // CHECK reports the difference
		refused       bool   // the next ADD fails
	}{
		"gateway removed":      {"ip addr del 10.71.0.1/24 dev chain0", "", true, false},
		"IPv6 gateway removed": {"ip addr del fd71::1/64 dev chain0", "", true, false},
		"another gateway": {"ip addr del 10.71.0.1/24 dev chain0; ip addr add 10.99.0.1/24 dev chain0",
			"ip addr del 10.99.0.1/24 dev chain0", true, true},
		"bridge down": {"ip link set chain0 down", "", true, false},
		"another MAC": {"ip link set chain0 address 02:00:00:00:00:77", "", false, false},
		"small MTU":   {"ip link set chain0 mtu 1400", "ip link set chain0 mtu 1500", false, false},
		"port removed from bridge": {"ip link set " + port + " nomaster",
			"ip link set " + port + " master chain0; bridge link set dev " + port + " hairpin on", true, false},
		"port down": {"ip link set " + port + " down", "ip link set " + port + " up", true, false},
		"hairpin off": {"bridge link set dev " + port + " hairpin off", "bridge link set dev " + port + " hairpin on", true,
			false},
		"IPv6 switched off on bridge": {"echo 1 >/proc/sys/net/ipv6/conf/chain0/disable_ipv6", "", true, false},
	}) {
		s.Points++
		harness.Shell(t, c.breaks)
		_, err := s.Do("CHECK", harness.Attachment(&sandbox.Pod{Path: "/run/netns/one"}, "one", nil), nil)
		if told := err != nil; told != c.told || told && !strings.Contains(err.Error(), "chain0") && !strings.Contains(err.Error(), port) {
			t.Errorf("%s: CHECK says %v", title, err)
		}
		pod := harness.NewPod(t, "two")
		rt := harness.Attachment(pod, "two", nil)
		_, err = s.Do("ADD", rt, nil)
		if (err != nil) != c.refused || harness.Coded(err) != nil {
			t.Errorf("%s: ADD says %v", title, err)
		}
		if c.mends != "" {
			harness.Shell(t, c.mends)
		}
		if c.refused {
			s.Must(t, "ADD", rt)
		}
		s.Next++
		for _, rt := range []*libcni.RuntimeConf{rt, harness.Attachment(s.stays, "stays", nil),
			harness.Attachment(&sandbox.Pod{Path: "/run/netns/one"}, "one", nil)} {
			if _, err := s.Do("CHECK", rt, nil); err != nil {
				s.NextFailed++
				t.Errorf("%s: CHECK of %s after the next ADD: %v", title, rt.ContainerID, err)
			}
		}
		v4, v6 := harness.Ping(pod, s.taken[0], harness.TrafficLimit), harness.Ping(pod, s.taken[1], harness.TrafficLimit)
		if err := errors.Join(v4, v6); err != nil {
			t.Errorf("%s: ping: %v", title, err)
		}
		s.Must(t, "DEL", rt)
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s.Report(t)
}

// testMACPolicy: with MACAddressPolicy=persistent, udev replaces a new link's MAC if addr_assign_type says that the kernel chose it.
// Podlace therefore creates bridge and port with their MACs.
func testMACPolicy(t *testing.T) {
	s := newSweep(t, "nftables")
	result, err := s.Do("ADD", harness.Attachment(harness.NewPod(t, "one"), "one", nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Must(t, "DEL", harness.Attachment(&sandbox.Pod{}, "one", nil))
	if _, err := os.Stat("/sys/class/net/chain0"); err != nil {
		t.Skip("SKIPPED: /sys of this network namespace cannot be mounted")
	}
	for _, link := range []string{"chain0", hostVethOf(t, result)} {
		s.Points++
		const set = "3" // NET_ADDR_SET, include/uapi/linux/netdevice.h
		if kind, err := os.ReadFile("/sys/class/net/" + link + "/addr_assign_type"); err != nil || strings.TrimSpace(string(kind)) != set {
			t.Errorf("%s has addr_assign_type %s, %v: udev would change its MAC", link, kind, err)
		}
	}
	s.Report(t)
}

// testSysctlsReset emulates `sysctl --system`. The next ADD sets the sysctls that pods need.
func testSysctlsReset(t *testing.T) {
	s := newSweep(t, "nftables")
	wanted := map[string]string{
		"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1", "ipv6/conf/chain0/accept_ra": "0", "ipv4/conf/chain0/route_localnet": "2",
		"ipv6/conf/chain0/disable_ipv6": "0",
	}
	pod := harness.NewPod(t, victimID)
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	for path, value := range harness.InOrder(wanted) {
		s.Points++
		harness.Shell(t, fmt.Sprintf("echo %s >/proc/sys/net/%s", map[string]string{"0": "1", "1": "0", "2": "0"}[value], path))
		s.Must(t, "ADD", rt)
		s.Next++
		for path, value := range wanted {
			if got, err := os.ReadFile("/proc/sys/net/" + path); err != nil || strings.TrimSpace(string(got)) != value {
				t.Errorf("%s is %s, want %s (%v)", path, got, value, err)
			}
		}
		s.Must(t, "CHECK", harness.Attachment(s.stays, "stays", nil))
		s.Must(t, "DEL", rt)
	}
	s.Report(t)
}

// TestFaultDAD attaches pods while duplicate address detection finds a neighbour with the same address, or IPv6 is disabled.
func TestFaultDAD(t *testing.T) {
	t.Run("F-30 IPv6 address used by a neighbour", func(t *testing.T) {
		conf := modelConf().With("name", "dad", "bridge", "dad0", "enabledad", true, "ipam.ranges",
			[]any{[]any{map[string]any{"subnet": "fd79::/120"}}})
		y := harness.Tally{Points: 1}
		neighbour, pod := harness.NewPod(t, "neighbour"), harness.NewPod(t, "pod")
		harness.NewCall("ADD", "bridge", neighbour, "neighbour", conf).Run(t).OK(t)
		harness.Shell(t, "nsenter --net="+neighbour.Path+" ip addr add fd79::9/120 dev eth0 nodad")
		before := harness.Watch(t, neighbour, pod)
		asks := harness.NewCall("ADD", "bridge", pod, "pod", conf).With("CNI_ARGS", harness.PodArgs+";IP=fd79::9")
		failure := asks.Run(t).Refused(t, harness.CodeIO, harness.CodeTaken)
		if !strings.Contains(failure.Msg, "fd79::9") {
			t.Errorf("the error does not name the address: %s", failure.Msg)
		}
		before.Clean(t, "the ADD that found a neighbour with its address")
		harness.NewCall("ADD", "bridge", pod, "pod", conf).Run(t).OK(t)
		y.Next++
		for _, id := range []string{"pod", "neighbour"} {
			harness.NewCall("DEL", "bridge", nil, id, conf).Run(t).OK(t)
		}
		y.Report(t)
	})
	t.Run("F-30 IPv6 switched off in new namespaces", func(t *testing.T) {
		s := newSweep(t, "nftables")
		s.tryCase(t, "ADD", func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if err := pod.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0o644)
			}); err != nil {
				return err
			}
			result, err := s.Do("ADD", rt, nil)
			if err != nil {
				return err
			}
			_, checked := s.Do("CHECK", rt, nil)
			reached := harness.Ping(nil, harness.Addresses(t, harness.RawObject(t, string(harness.Encode(result))))[1], harness.TrafficLimit)
			_, del := s.Do("DEL", rt, nil)
			return errors.Join(checked, reached, del)
		})
		s.Report(t)
	})
}
