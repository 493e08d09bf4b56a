// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// callOutput is the exit code and the result or error of a plugin call.
type callOutput struct {
	exit       int
	stdout     string
	Interfaces []struct{ Name, Mac, Sandbox string }
	IPs        []struct {
		Interface *int
		Address   string
	} `json:"ips"`
	IP4  struct{ IP string } `json:"ip4"`
	Code uint                `json:"code"`
	Msg  string              `json:"msg"`
}

// callPlugin calls the plugin with a CNI command, a CNI version and additional configuration keys.
func callPlugin(t *testing.T, pod *sandbox.Pod, verb, version, keys string) callOutput {
	t.Helper()
	env := map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": "id", "CNI_IFNAME": "ignored0", "CNI_NETNS": pod.Path, "CNI_PATH": "/"}
	if keys != "" {
		keys = "," + keys
	}
	var stdout, stderr bytes.Buffer
	stdin := strings.NewReader(fmt.Sprintf(`{"cniVersion":%q,"name":"net","type":"loopback"%s}`, version, keys))
	a := callOutput{exit: Plugin().Run(func(name string) string { return env[name] }, stdin, &stdout, &stderr)}
	a.stdout = stdout.String()
	if err := json.Unmarshal(stdout.Bytes(), &a); err != nil && a.stdout != "" {
		t.Errorf("%s: %v in %s", verb, err, a.stdout)
	}
	return a
}

func (a callOutput) ok(t *testing.T) callOutput {
	t.Helper()
	if a.exit != 0 {
		t.Fatalf("exit %d: %s", a.exit, a.stdout)
	}
	return a
}

func (a callOutput) fails(t *testing.T, code uint, says string) {
	t.Helper()
	if a.exit != 1 || a.Code != code || !strings.Contains(a.Msg, says) {
		t.Errorf("exit %d, %s: want code %d and %q", a.exit, a.stdout, code, says)
	}
}

// withLo calls change with the link lo inside the pod.
func withLo(t *testing.T, pod *sandbox.Pod, change func(netlink.Link) error) {
	t.Helper()
	err := pod.Do(func() error {
		link, err := netlink.LinkByName("lo")
		return errors.Join(err, change(link))
	})
	if err != nil {
		t.Fatal(err)
	}
}

func isUp(t *testing.T, pod *sandbox.Pod) (up bool) {
	t.Helper()
	withLo(t, pod, func(link netlink.Link) error {
		up = link.Attrs().Flags&net.FlagUp != 0
		return nil
	})
	return up
}

// The result of ADD has the format of the configuration's CNI version, and DEL sets lo down.
func TestVersions(t *testing.T) {
	for _, v := range []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		pod := kerneltest.NewPod(t)
		for range 2 { // a repeated ADD converges
			a := callPlugin(t, pod, "ADD", v, "").ok(t)
			if !isUp(t, pod) {
				t.Errorf("%s: lo is down", v)
			}
			if v < "0.3.0" {
				if a.IP4.IP != "127.0.0.1/8" || len(a.Interfaces) > 0 {
					t.Errorf("%s: %s", v, a.stdout)
				}
				continue
			}
			if len(a.Interfaces) != 1 || a.Interfaces[0].Name != "lo" || a.Interfaces[0].Mac != "00:00:00:00:00:00" ||
				a.Interfaces[0].Sandbox != pod.Path {
				t.Errorf("%s: %s", v, a.stdout)
			}
			if len(a.IPs) != 2 || a.IPs[0].Address != "127.0.0.1/8" || a.IPs[1].Address != "::1/128" || a.IPs[0].Interface == nil ||
				*a.IPs[0].Interface != 0 {
				t.Errorf("%s: %s", v, a.stdout)
			}
		}
		for range 2 {
			callPlugin(t, pod, "DEL", v, "").ok(t)
			if isUp(t, pod) {
				t.Errorf("%s: lo is up after DEL", v)
			}
		}
	}
}

// After a main plugin in a chain, the plugin receives a prevResult and returns it unchanged.
func TestPrevResult(t *testing.T) {
	pod := kerneltest.NewPod(t)
	const prev = `"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.1.0.5/24","interface":0}]}`
	a := callPlugin(t, pod, "ADD", "1.1.0", prev).ok(t)
	if !isUp(t, pod) || len(a.Interfaces) != 1 || a.Interfaces[0].Name != "eth0" || len(a.IPs) != 1 {
		t.Errorf("got %s", a.stdout)
	}
	callPlugin(t, pod, "CHECK", "1.1.0", prev).ok(t)
}

func TestCheckDetects(t *testing.T) {
	for what, c := range map[string]struct {
		change func(netlink.Link) error
		says   string
	}{
		"down": {netlink.LinkSetDown, "lo is down"},
		"no IPv4": {func(link netlink.Link) error {
			return netlink.AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(127, 0, 0, 1), Mask: net.CIDRMask(8, 32)}})
		}, "lo lacks 127.0.0.1/8"},
		"no IPv6": {func(link netlink.Link) error {
			return netlink.AddrDel(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)}})
		}, "lo lacks ::1/128"},
	} {
		pod := kerneltest.NewPod(t)
		prev := `"prevResult":` + callPlugin(t, pod, "ADD", "1.1.0", "").ok(t).stdout
		callPlugin(t, pod, "CHECK", "1.1.0", prev).ok(t)
		withLo(t, pod, c.change)
		if a := callPlugin(t, pod, "CHECK", "1.1.0", prev); a.Code != plugin.CodeStateDiffers || !strings.Contains(a.Msg, c.says) {
			t.Errorf("%s: %s", what, a.stdout)
		}
	}
}

func TestForeignAddress(t *testing.T) {
	pod := kerneltest.NewPod(t)
	withLo(t, pod, func(link netlink.Link) error {
		return netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(32, 32)}})
	})
	callPlugin(t, pod, "ADD", "1.1.0", "").fails(t, plugin.CodeStateDiffers, "lo has the address 192.0.2.1/32, which is no loopback address")
}

// Concurrent ADDs for one pod succeed.
func TestParallel(t *testing.T) {
	pod := kerneltest.NewPod(t)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			if a := callPlugin(t, pod, "ADD", "1.0.0", ""); a.exit != 0 || len(a.IPs) != 2 {
				t.Errorf("exit %d: %s", a.exit, a.stdout)
			}
		})
	}
	group.Wait()
}

func TestWithoutNamespace(t *testing.T) {
	gone := &sandbox.Pod{Path: "/run/netns/gone"}
	callPlugin(t, gone, "DEL", "1.0.0", "").ok(t)
	callPlugin(t, gone, "ADD", "1.0.0", "").fails(t, plugin.CodeNetns, "CNI_NETNS")
	callPlugin(t, gone, "STATUS", "1.1.0", "").ok(t)
	callPlugin(t, gone, "GC", "1.1.0", `"cni.dev/valid-attachments":[]`).ok(t)
}
