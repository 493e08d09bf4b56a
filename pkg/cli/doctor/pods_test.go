// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// pod adds a live pod with a record and an entry in libcni's cache.
func (l lab) pod(id, conf string) {
	l.t.Helper()
	space := kerneltest.NewPod(l.t)
	att, err := attachment.Open(&plugin.Request{Plugin: "bridge", Network: "pods", ContainerID: id, IfName: "eth0", NetnsPath: space.Path,
		Pod: plugin.Pod{Namespace: "shop", Name: id}, Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = att.Save(map[string]any{"bridge": "cnidoc", "gateways": []string{"10.91.0.1/29"}})
		att.Close()
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { os.RemoveAll("/run/podlace/pods") })
	entry, err := json.Marshal(map[string]any{"kind": "cniCacheV1", "containerId": id, "ifName": "eth0", "networkName": "pods",
		"netns": space.Path, "config": []byte(conf), "result": map[string]any{"cniVersion": "1.0.0"},
		"cniArgs": [][2]string{{"K8S_POD_NAME", id}}})
	if err != nil {
		l.t.Fatal(err)
	}
	l.machine("/var/lib/cni/results/pods-"+id+"-eth0", string(entry))
}

// checks installs a bridge plugin whose CHECK runs a shell command.
func (l lab) checks(command string) {
	l.t.Helper()
	l.plugin("bridge", "plugin of Podlace v1")
	text, err := os.ReadFile(filepath.Join(l.BinDir, "bridge"))
	if err != nil {
		l.t.Fatal(err)
	}
	l.write("bin/bridge", string(text)+"[ \"$CNI_COMMAND\" != CHECK ] || { "+command+"; }\n")
}

// TestPods: the same error of several pods is reported once, with a remedy. CHECK gets the arguments and the result of the pod's ADD.
func TestPods(t *testing.T) {
	l := newLab(t)
	if found := l.problems("pods"); len(found) > 0 {
		t.Errorf("without pods: %q", found)
	}
	l.pod("web-1", ours)
	l.pod("web-2", ours)
	l.checks("cat; exit 0")
	if found := l.problems("pods"); len(found) > 0 {
		t.Errorf("healthy pods: %q", found)
	}
	for command, want := range map[string][]string{
		`echo '{"code": 100, "msg": "bridge check: bridge cni0 is down"}'; exit 1`: {"error CHECK of bridge fails for pods: 2 | " +
			"code 100: bridge check: bridge cni0 is down; for example pod shop/web-1 | ip link set cni0 up; podlace reload"},
		`echo '{"code": 100, "msg": "bridge check: veth7, the host side of eth0, is down"}'; exit 1`: {"| ip link set veth7 up; podlace reload"},
		`[ $CNI_CONTAINERID = web-1 ] || { echo "{\"code\": 100, \"msg\": \"no route $CNI_ARGS\"}"; exit 1; }`: {"fails for pods: 1 | " +
			"code 100: no route K8S_POD_NAME=web-2; for example pod shop/web-2 | podlace reload; podlace trace shop/web-2;"},
		`echo '{"code": 100, "msg": "bridge check: veth7 is not a port of cni0"}'; exit 1`:                       {},
		`grep -q '"prevResult":{"cniVersion":"1.0.0"' && exit 0; echo '{"code": 6, "msg": "no result"}'; exit 1`: {},
	} {
		l.checks(command)
		found := l.problems("pods")
		if len(found) != len(want) || len(want) == 1 && !strings.Contains(found[0], want[0]) {
			t.Errorf("%s: got %q, want %q", command, found, want)
		}
	}
}

// TestPodsWithoutCheck: no CHECK runs for a configuration that lacks or disables it.
func TestPodsWithoutCheck(t *testing.T) {
	for version, want := range map[string]int{`"0.3.1"`: 0, `"0.4.0"`: 1, `"0.4.0", "disableCheck": true`: 0} {
		t.Run(version, func(t *testing.T) {
			l := newLab(t)
			l.pod("web-6", strings.Replace(ours, `"1.0.0"`, version, 1))
			l.checks(`echo '{"code": 100, "msg": "no route"}'; exit 1`)
			if found := l.problems("pods"); len(found) != want {
				t.Errorf("got %q, want %d", found, want)
			}
		})
	}
}

// TestPodsLeftOut: doctor says how many pods it did not check within the time limit.
func TestPodsLeftOut(t *testing.T) {
	l := newLab(t)
	l.pod("web-5", ours)
	n, err := look(l.Options)
	if err != nil {
		t.Fatal(err)
	}
	defer n.host.Close()
	const want = "CHECK ran for 0 of 1 pods in 0s"
	if found := n.podsWithin(0); len(found) != 1 || found[0].Level != Skipped || !strings.Contains(found[0].What, want) {
		t.Errorf("%+v", found)
	}
	if found := n.pods(); len(found) > 0 {
		t.Errorf("with time: %+v", found)
	}
}

// TestChangedSubnets: a changed subnet is reported only if ADD fails because a live pod still has an address in the old one.
func TestChangedSubnets(t *testing.T) {
	l := newLab(t)
	l.pod("web-3", ours)
	for subnet, want := range map[string]string{
		"10.91.0.0/29": "",
		"10.91.0.0/24": "cnidoc has 10.91.0.1/29 for shop/web-3; the configuration has [10.91.0.0/24]",
		"10.92.0.0/24": "cnidoc has 10.91.0.1/29",
		"fd00:91::/64": "",
		`10.92.0.0/24"}]]}, "forceAddress": true, "x": {"y": [[{"z": "`: "",
	} {
		l.write("net.d/10-podlace.conflist", strings.Replace(ours, "10.91.0.0/29", subnet, 1))
		found := strings.Join(l.problems("addresses"), "\n")
		if (found == "") != (want == "") || !strings.Contains(found, want) {
			t.Errorf("%s: %q", subnet, found)
		}
	}
}

// TestForwardingWithoutPods: connections to Services come in through a node without pods, so the families of its podCIDRs count.
func TestForwardingWithoutPods(t *testing.T) {
	l := newLab(t)
	l.machine("/run/podlace/node.json", `{"podCIDRs": ["10.244.1.0/24"]}`)
	l.sysctl("ipv4/ip_forward", "0")
	l.sysctl("ipv6/conf/all/forwarding", "0")
	if found := l.problems("forwarding"); len(found) != 1 || !strings.Contains(found[0], "net.ipv4.ip_forward = 0") {
		t.Errorf("%q", found)
	}
}

// TestForwarding: forwarding that is off for a bridge, an uplink or the whole node is reported.
func TestForwarding(t *testing.T) {
	l := newLab(t)
	l.pod("web-4", ours)
	l.machine("/var/lib/cni/networks/pods/10.91.0.2", "web-4\r\neth0")
	l.bridge("cnidoc", 1500)
	l.sysctl("ipv4/ip_forward", "1")
	if found := l.problems("forwarding"); len(found) > 0 {
		t.Errorf("forwarding is enabled: %q", found)
	}
	l.sysctl("ipv4/conf/cnidoc/forwarding", "0")
	const want = "net.ipv4.conf.cnidoc.forwarding = 0 | sysctl -w net.ipv4.conf.cnidoc.forwarding=1"
	if found := l.problems("forwarding"); len(found) != 1 || !strings.Contains(found[0], want) {
		t.Errorf("got %q, want %q", found, want)
	}
	run := func(script string) {
		if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
	}
	run("sysctl -qw net.ipv4.conf.cnidoc.forwarding=1; ip link add uplink9 up type veth peer name uplink8; ip link set uplink8 up; " +
		"ip route add default dev uplink9 metric 900; sysctl -qw net.ipv4.conf.uplink9.forwarding=0")
	if found := l.problems("forwarding"); len(found) != 1 || !strings.Contains(found[0], "net.ipv4.conf.uplink9.forwarding = 0") {
		t.Errorf("forwarding of the uplink is disabled: %q", found)
	}
	run("ip link del uplink9")
	l.sysctl("ipv4/ip_forward", "0")
	if found := l.problems("forwarding"); len(found) != 1 || !strings.Contains(found[0], "net.ipv4.ip_forward = 0") {
		t.Errorf("forwarding of the node is disabled: %q", found)
	}
}
