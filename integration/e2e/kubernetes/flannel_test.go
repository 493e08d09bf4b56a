// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Numbers of shell blocks in the section "From flannel" of docs/MOVING.md. TestFlannel runs each line of each.
const (
	blockApply = iota
	blockLeftovers
	blockFolder
	blockBack
	blockRoutes
	blockRemove
	blocks
)

const flannelConflist = `{"name": "cbr0", "cniVersion": "0.3.1", "plugins": [
	{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`

// flannelCluster is a cluster that started with flannel as its pod network.
type flannelCluster struct {
	*testWorld
	backend  string
	manifest string
	nodes    []string // the nodes that reach each other through flannel
	steps    []string
	oldRules string // the commands that remove the rules of flannel and of the reference plugins
}

// TestFlannel moves a cluster from flannel to Podlace, back, and again to Podlace, with the commands of docs/MOVING.md. Pods' connections
// survive. No packet is lost with the backend host-gw; with vxlan, those between two nodes are lost until both have the tunnel.
func TestFlannel(t *testing.T) {
	if os.Getenv("FLANNEL") == "" || os.Getenv("REFERENCE") == "" {
		t.Skip("SKIP, no flannel: FLANNEL or REFERENCE is not set; make cluster ARGS='-test -run TestFlannel' builds both")
	}
	for _, backend := range []string{"host-gw", "vxlan"} {
		t.Run(backend, func(t *testing.T) {
			f := startFlannel(t, backend)
			all := f.startCalls(t, f.tcpPaths("server", "client"), nil)
			during := f.startTraffic(t, "client", "server")
			f.takeOver(t)
			during.endCalls(t, "taking over", backend == "vxlan")
			f.addPodsOf(t, "new", "Podlace")
			during = f.startTraffic(t, "new", "server")
			f.giveBack(t)
			during.endCalls(t, "giving back", backend == "vxlan")
			f.addPodsOf(t, "back", "flannel")
			f.removePodlace(t)
			during = f.startTraffic(t, "back", "client")
			f.takeOver(t)
			during.endCalls(t, "taking over again", backend == "vxlan")
			all.endCalls(t, "all the time", false)
			f.addPodsOf(t, "last", "Podlace")
			f.removeFlannel(t)
		})
	}
}

// startFlannel starts a cluster with flannel as its pod network, and the pods and Services of the matrix (see matrixPods and
// matrixServices).
func startFlannel(t *testing.T, backend string) *flannelCluster {
	t.Helper()
	c := startCluster(t, "4", "PROXY=iptables", "BRIDGE_NF=1")
	f := &flannelCluster{testWorld: &testWorld{testCluster: c}, backend: backend, nodes: []string{"1", "2", "3"},
		steps: documentedBlocks(t, "docs/MOVING.md", "From flannel", "bash", blocks)}
	f.oldRules = strings.ReplaceAll(documentedBlocks(t, "docs/MOVING.md", "Removing old rules", "sh", 2)[0], "sudo ", "")
	offLink := "vxlan"
	if backend == "host-gw" { // host-gw needs nodes on one link
		f.nodes, offLink = []string{"1", "2"}, "refuse"
	}
	manifest, err := os.ReadFile(os.Getenv("MANIFEST"))
	if err != nil {
		t.Fatal(err)
	}
	f.manifest = strings.Replace(string(manifest), `"offLink": "vxlan"`, fmt.Sprintf(`"offLink": %q`, offLink), 1)
	f.writeRemoval(t, string(manifest))
	f.write(t, "net-conf.json", fmt.Sprintf(`{"Network": "10.244.0.0/16", "Backend": {"Type": %q}}`, backend))
	f.write(t, "10-flannel.conflist", flannelConflist)
	for _, n := range c.machineNames()[1:] {
		c.runScript(t, "exec", n, "sh", "-ec", `mkdir -p /opt/cni/bin /etc/cni/net.d
			cd "$0" && cp bridge host-local loopback portmap /opt/cni/bin/ && cp "$1/flannel" /opt/cni/bin/`,
			os.Getenv("REFERENCE"), os.Getenv("FLANNEL"))
	}
	f.startDaemons(t)
	c.kubectl(t, "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
	f.testWorld = newWorld(t, c)
	for name, p := range f.places {
		if !strings.HasPrefix(name, "node") {
			serveEcho(t, p)
		}
	}
	f.checkRoutes(t, "flannel")
	return f
}

// writeRemoval writes the manifest that removes Podlace.
func (c *testCluster) writeRemoval(t *testing.T, manifest string) {
	t.Helper()
	_, image, _ := strings.Cut(manifest, "image: ")
	image, _, _ = strings.Cut(image, "\n")
	cmd := exec.Command("make", "-s", "-C", "../../..", "manifest", "IMAGE="+image, "COMPONENTS=removal")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	c.write(t, "removal.yaml", string(out))
}

func (c *testCluster) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// documentedBlocks returns the code blocks of a language in a section, which must have this many.
func documentedBlocks(t *testing.T, document, heading, lang string, want int) (list []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../..", document))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, part := range strings.Split(section, "```"+lang+"\n")[1:] {
		block, _, _ := strings.Cut(part, "```")
		list = append(list, block)
	}
	if len(list) != want {
		t.Fatalf("%s has %d code blocks of %s under %q, want %d", document, len(list), lang, heading, want)
	}
	return list
}

// runBlock runs a block of the documentation in several machines.
func (f *flannelCluster) runBlock(t *testing.T, block int, machines ...string) {
	t.Helper()
	for _, m := range machines {
		f.runLines(t, m, f.steps[block])
	}
}

// runLines runs lines of the documentation in one machine.
func (c *testCluster) runLines(t *testing.T, machine, lines string) string {
	t.Helper()
	out := c.runScript(t, "exec", machine, "env", "PATH="+os.Getenv("KUBERNETES")+":"+os.Getenv("PATH"), "bash", "-ec", "cd "+c.dir+"\n"+lines)
	t.Logf("%s: %s%s", machine, lines, out)
	return out
}

// startDaemons runs flanneld and writes the conflist, as flannel's DaemonSet does.
func (f *flannelCluster) startDaemons(t *testing.T) {
	t.Helper()
	for _, n := range f.machineNames()[1:] {
		f.runScript(t, "exec", n, "sh", "-ec", `
			NODE_NAME=$1 setsid "$2/flanneld" --kube-subnet-mgr --kubeconfig-file="$0/plane/admin.kubeconfig" --iface=eth0 --ip-masq \
				--net-config-path="$0/net-conf.json" </dev/null >>"$0/$1/flannel.log" 2>&1 &
			echo $! >/run/flannel.pid
			for i in $(seq 300); do [ ! -e /run/flannel/subnet.env ] || break; sleep 0.2; done
			cp "$0/10-flannel.conflist" /etc/cni/net.d/new
			mv /etc/cni/net.d/new /etc/cni/net.d/10-flannel.conflist`, f.dir, n, os.Getenv("FLANNEL"))
	}
}

// takeOver moves the cluster to Podlace, stops flannel, and removes its state, except what running pods still need.
func (f *flannelCluster) takeOver(t *testing.T) {
	t.Helper()
	f.write(t, "podlace.yaml", f.manifest)
	f.runBlock(t, blockApply, "plane")
	f.checkRoutes(t, "142")
	for _, n := range f.machineNames()[1:] {
		f.runScript(t, "exec", n, "sh", "-ec", "kill $(cat /run/flannel.pid); rm /run/flannel.pid")
	}
	f.runBlock(t, blockLeftovers, f.machineNames()[1:]...)
	f.checkRoutes(t, "142")
}

// giveBack moves the cluster back to flannel.
func (f *flannelCluster) giveBack(t *testing.T) {
	t.Helper()
	f.runBlock(t, blockBack, "plane")
	f.startDaemons(t)
	if f.backend == "host-gw" {
		f.runBlock(t, blockRoutes, f.machineNames()[1:]...)
	}
	f.checkRoutes(t, "flannel")
}

// removePodlace replaces the pods that Podlace attached, and then removes Podlace.
func (f *flannelCluster) removePodlace(t *testing.T) {
	t.Helper()
	for _, n := range f.nodes {
		f.kubectl(t, "-n", namespace, "delete", "pod", "new"+n)
	}
	f.runBlock(t, blockRemove, "plane")
	f.checkLeases(t)
	f.checkRoutes(t, "flannel")
	f.ask4(t, "client1", "server2")
}

// removeFlannel deletes the last pods that flannel attached, and then its rules, while traffic between Podlace's pods continues.
func (f *flannelCluster) removeFlannel(t *testing.T) {
	t.Helper()
	during := f.startTraffic(t, "last", "last")
	for _, n := range []string{"1", "2", "3"} {
		f.kubectl(t, "-n", namespace, "delete", "pod", "server"+n, "client"+n)
	}
	for _, n := range f.nodes {
		f.kubectl(t, "-n", namespace, "delete", "pod", "back"+n)
	}
	for _, n := range f.machineNames()[1:] {
		f.runLines(t, n, f.oldRules)
	}
	f.runBlock(t, blockFolder, f.machineNames()[1:]...)
	during.endCalls(t, "removing flannel's rules", false)
	f.checkLeases(t)
	for _, n := range f.machineNames()[1:] {
		rules := f.runScript(t, "exec", n, "sh", "-c", "iptables-save; ip link; ls /run/flannel /var/lib/cni/flannel 2>&1 || :")
		for _, word := range []string{"FLANNEL", "flannel.1", "CNI-DN-", "subnet.env"} {
			if strings.Contains(rules, word) {
				t.Errorf("%s still has %s:\n%s", n, word, rules)
			}
		}
	}
}

// checkRoutes waits until each node has the routes to the others, all of which must be Podlace's (protocol 142) or all flannel's.
func (f *flannelCluster) checkRoutes(t *testing.T, whose string) {
	t.Helper()
	for _, n := range f.nodes {
		for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
			routes := f.runScript(t, "exec", "node"+n, "ip", "-4", "route", "show", "type", "unicast")
			ours, others := 0, 0
			for line := range strings.Lines(routes) {
				switch {
				case !strings.HasPrefix(line, "10.244.") || !strings.Contains(line, " via "):
				case strings.Contains(line, "proto 142"):
					ours++
				default:
					others++
				}
			}
			if others == len(f.nodes)-1 && ours == 0 && whose == "flannel" || ours == len(f.nodes)-1 && others == 0 && whose == "142" {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("node%s has %d routes of Podlace and %d others, want those of %s:\n%s", n, ours, others, whose, routes)
			}
		}
	}
}

// checkLeases checks that each leased address belongs to exactly one existing pod.
func (f *flannelCluster) checkLeases(t *testing.T) {
	t.Helper()
	var list struct {
		Items []struct {
			Spec   struct{ NodeName string }
			Status struct{ PodIP string }
		}
	}
	f.getObjects(t, &list, "-n", namespace, "pods")
	for _, n := range f.machineNames()[1:] {
		var want []string
		for _, p := range list.Items {
			if p.Spec.NodeName == n {
				want = append(want, p.Status.PodIP)
			}
		}
		slices.Sort(want)
		got := strings.Fields(f.runScript(t, "exec", n, "sh", "-c", "cd /var/lib/cni/networks/cbr0 && ls -d 10.* || :"))
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s leases %v, and its pods have %v", n, got, want)
		}
	}
}
