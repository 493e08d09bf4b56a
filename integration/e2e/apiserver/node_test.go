// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

// agentNode is a network namespace with its own state folders, in which an agent runs.
type agentNode struct {
	*controlPlane
	name  string
	ns    *sandbox.Pod
	dir   string // contains the folders run, lib, bin, net.d, config
	agent *testProcess
}

// createLinks creates the nodes' two links. The tests' namespace is the router between them and has no routes to pods.
func createLinks(t *testing.T) {
	t.Helper()
	harness.Shell(t, `
		ip link add lan type bridge; ip link set lan up; ip addr add `+apiAddress+`/12 dev lan; ip -6 addr add fd00:2::ffff/64 dev lan nodad
		ip link add far type bridge; ip link set far up; ip addr add 198.51.100.254/24 dev far; ip -6 addr add fd00:3::ffff/64 dev far nodad
		sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1`)
	t.Cleanup(func() { harness.Shell(t, "ip link del lan; ip link del far") })
}

// newNode creates the node with the given number on a link, without an agent.
func (p *controlPlane) newNode(id int, link string) *agentNode {
	p.Helper()
	n := &agentNode{controlPlane: p, name: nodeName(id), dir: p.TempDir(), ns: harness.NewPod(p, fmt.Sprintf("%s-%d", harness.Plain(p.T), id))}
	via := map[string][2]string{"lan": {apiAddress, "fd00:2::ffff"}, "far": {"198.51.100.254", "fd00:3::ffff"}}[link]
	own := nodeAddresses(id, link)
	length := map[string]int{"lan": 12, "far": 24}[link]
	port := fmt.Sprint(link, id)
	harness.Shell(p, fmt.Sprintf(`
		ip link add %[2]s master %[3]s type veth peer name eth0 netns %[1]s; ip link set %[2]s up; ip -n %[1]s link set lo up
		ip -n %[1]s addr add %[4]s/%[5]d dev eth0; ip -n %[1]s -6 addr add %[6]s/64 dev eth0 nodad; ip -n %[1]s link set eth0 up
		ip -n %[1]s route add default via %[7]s; ip -n %[1]s -6 route add default via %[8]s`,
		n.ns.Name, port, link, own[0], length, own[1], via[0], via[1]))
	p.Cleanup(func() { harness.Shell(p, "ip link del "+port) })
	for _, sub := range []string{"run", "lib", "bin", "net.d", "config"} {
		kerneltest.Must(p, os.Mkdir(filepath.Join(n.dir, sub), 0o755))
	}
	harness.Shell(p, "mkdir -p -m 700 /run/podlace /var/lib/cni")
	n.writeConfig()
	return n
}

// writeConfig writes the shipped configuration of the agent, but with the folders of this simulated node.
func (n *agentNode) writeConfig() {
	n.Helper()
	conf := map[string]any{}
	text, err := os.ReadFile("../../../conf/cluster/components/vxlan/config.json")
	kerneltest.Must(n, err, json.Unmarshal(text, &conf))
	conf["binDir"], conf["confDir"] = n.dir+"/bin", n.dir+"/net.d"
	text, err = json.Marshal(conf)
	kerneltest.Must(n, err, os.WriteFile(n.dir+"/config/config.json", text, 0o644))
	text, err = os.ReadFile("../../../conf/cluster/base/" + conflistName)
	kerneltest.Must(n, err, os.WriteFile(n.dir+"/config/"+conflistName, text, 0o644))
	kerneltest.Must(n, os.WriteFile(n.dir+"/config/kubeconfig", harness.Encode(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"contexts": []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c", "user": "u"}}},
		"users":    []any{map[string]any{"name": "u", "user": map[string]any{"token": n.token}}},
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{"server": "https://" + apiAddress + ":6443",
			"certificate-authority": n.ca()}}}}), 0o600))
}

const conflistName = "10-podlace.conflist"

// nodeCommand returns a command in the node's namespace, with the node's state folders.
func (n *agentNode) nodeCommand(program string, args ...string) *exec.Cmd {
	script := `mount --bind "$0/run" /run/podlace; mount --bind "$0/lib" /var/lib/cni; exec "$@"`
	return exec.Command("unshare",
		append([]string{"--mount", "sh", "-ec", script, n.dir, "nsenter", "--net=" + n.ns.Path, program}, args...)...)
}

func agentProgram() string { return filepath.Join(harness.BinDir(), "podlace-node") }

// startAgent runs the agent with the arguments of the DaemonSet.
func (n *agentNode) startAgent() {
	n.Helper()
	cmd := n.nodeCommand(agentProgram(), "run", "--config", n.dir+"/config/config.json", "--kubeconfig", n.dir+"/config/kubeconfig",
		"--plugins", harness.BinDir())
	cmd.Env = append(os.Environ(), "NODE_NAME="+n.name)
	for _, v := range shippedContainer(n.T).Env {
		if v.Value != "" {
			cmd.Env = append(cmd.Env, v.Name+"="+v.Value)
		}
	}
	n.agent = startProcess(n.T, filepath.Join(n.dir, "agent.log"), cmd)
}

// stopAgent ends the agent with SIGTERM, like a kubelet.
func (n *agentNode) stopAgent() { n.agent.signalWait(syscall.SIGTERM) }

// awaitReady waits until the agent reports that its node is ready.
func (n *agentNode) awaitReady() {
	n.Helper()
	harness.Await(n, n.name+" to be ready", func() bool { return n.nodeCommand(agentProgram(), "run", "--ready").Run() == nil })
}

// routeGateways returns the gateways of the agent's routes in the kernel. An unreachable route has the zero value.
func (n *agentNode) routeGateways() (list map[netip.Prefix]netip.Addr) {
	n.Helper()
	list = map[netip.Prefix]netip.Addr{}
	kerneltest.Must(n, n.ns.Do(func() error {
		host, err := kernel.Host()
		if err != nil {
			return err
		}
		defer host.Close()
		nexthops, err := host.Nexthops()
		if err != nil {
			return err
		}
		gateways := map[uint32]netip.Addr{}
		for _, h := range nexthops {
			gateways[h.ID] = h.Gateway
		}
		routes, err := host.ProtocolRoutes(noderoutes.Protocol)
		for _, r := range routes {
			list[r.Dst] = gateways[r.Nexthop]
		}
		return err
	}))
	return list
}

// monitorWrites records changes in the kernel and in the node's files, which the returned function returns.
func (n *agentNode) monitorWrites() (changes func() []string) {
	n.Helper()
	kerneltest.Must(n, n.ns.Do(func() error {
		list, stop, err := kerneltest.Monitor(n.dir+"/run", n.dir+"/bin", n.dir+"/net.d")
		if err == nil {
			n.Cleanup(stop)
		}
		changes = list
		return err
	}))
	return changes
}

// routeArrivals are the times at which the kernel reported new routes.
type routeArrivals struct {
	mu   sync.Mutex
	at   map[netip.Prefix]time.Time // the first event
	gone int                        // routes that were deleted
	lost error                      // the kernel dropped events
	node *agentNode
}

// recordArrivals stores the time of each new route until the end of the test.
func (n *agentNode) recordArrivals() *routeArrivals {
	n.Helper()
	a := &routeArrivals{at: map[netip.Prefix]time.Time{}, node: n}
	updates, done := make(chan netlink.RouteUpdate, 100), make(chan struct{})
	n.Cleanup(func() { close(done) })
	kerneltest.Must(n, n.ns.Do(func() error {
		return netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{
			ErrorCallback: func(err error) { a.mu.Lock(); a.lost = err; a.mu.Unlock() }})
	}))
	go func() {
		for u := range updates {
			if u.Protocol != noderoutes.Protocol || u.Dst == nil {
				continue
			}
			now := time.Now()
			addr, _ := netip.AddrFromSlice(u.Dst.IP)
			ones, _ := u.Dst.Mask.Size()
			dst := netip.PrefixFrom(addr.Unmap(), ones)
			a.mu.Lock()
			if _, known := a.at[dst]; !known && u.Type == unix.RTM_NEWROUTE {
				a.at[dst] = now
			}
			if u.Type == unix.RTM_DELROUTE {
				a.gone++
			}
			a.mu.Unlock()
		}
	}()
	return a
}

// lastArrival returns when the last of the routes appeared. The second result is false if one is missing.
func (a *routeArrivals) lastArrival(prefixes []netip.Prefix) (last time.Time, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range prefixes {
		at, known := a.at[p]
		if !known {
			return last, false
		}
		if at.After(last) {
			last = at
		}
	}
	return last, true
}

// deletedRoutes returns the number of deleted routes.
func (a *routeArrivals) deletedRoutes() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone
}

// droppedEvents reports whether the kernel dropped events because the buffer was full.
func (a *routeArrivals) droppedEvents() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lost != nil
}

// readRoutes reads the routes from the kernel, and stores the current time for each route whose event was lost.
func (a *routeArrivals) readRoutes() {
	routes, now := a.node.routeGateways(), time.Now()
	a.mu.Lock()
	defer a.mu.Unlock()
	for dst := range routes {
		if _, known := a.at[dst]; !known {
			a.at[dst] = now
		}
	}
}

type nodeExec struct {
	*invoke.DefaultExec
	node *agentNode
}

// ExecPlugin implements libcni's invoke.Exec.
func (p nodeExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	cmd := p.node.nodeCommand(path)
	var stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stderr = env, bytes.NewReader(stdin), &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s%s", filepath.Base(path), err, out, stderr.Bytes())
	}
	return out, ctx.Err()
}

// openNetwork opens the conflist that the agent installed, in the same way as a container runtime.
func (n *agentNode) openNetwork() *harness.Network {
	n.Helper()
	text, err := os.ReadFile(n.dir + "/net.d/" + conflistName)
	kerneltest.Must(n, err)
	network, err := harness.OpenNetwork(text, n.TempDir(), nil)
	kerneltest.Must(n, err)
	network.CNI = libcni.NewCNIConfigWithCacheDir([]string{n.dir + "/bin"}, n.TempDir(),
		nodeExec{&invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}, n})
	return network
}

// attachPod attaches a pod to the node until the end of the test. Its port 80 returns its name.
func (n *agentNode) attachPod() *sandbox.Pod {
	n.Helper()
	pod, network := harness.NewPod(n, n.ns.Name+"-pod"), n.openNetwork()
	rt := harness.Named(pod, nil)
	network.Must(n, "STATUS", rt)
	network.Must(n, "ADD", rt)
	n.Cleanup(func() { network.Must(n, "DEL", rt) })
	server, err := harness.Serve(pod, 80)
	kerneltest.Must(n, err)
	n.Cleanup(func() { _ = server.Close() })
	return pod
}

// statusProblems returns the problems that `podlace-node status` prints.
func (n *agentNode) statusProblems() string {
	out, err := n.nodeCommand(agentProgram(), "status", "--all").CombinedOutput()
	if err == nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
