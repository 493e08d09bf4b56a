// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/store"
)

// agentEnv, if set, makes the test binary run as podlace-node.
const agentEnv = "PODLACE_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(panicEnv) != "" {
		os.Exit(panicking())
	}
	if filepath.Base(os.Args[0]) == "podlace-bridge" { // the test program, installed as a plugin
		os.Exit(bridge.Plugin(hostlocal.Plugin()).Main())
	}
	if os.Getenv(agentEnv) != "" {
		os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	kerneltest.Main(m)
}

// lab is node n1 of a test cluster, in the namespace of the test. n2 and n3 are on the same link; n9 is in another subnet behind a router.
type lab struct {
	*testing.T
	options
	api  *fakeAPI
	lan  *sandbox.Pod // the other end of the link: n2, n3 and the router
	dir  string       // has the folders config, bin, net.d and plugins
	log  *lines
	stop func() // ends the agent
}

const labConfig = `{"clusterCIDRs": ["10.244.0.0/16", "fd00:10:244::/56"], "binDir": "%[1]s/bin", "confDir": "%[1]s/net.d"}`

// newLab returns a lab without a running agent; extra holds more keys of the configuration.
func newLab(t *testing.T, extra ...string) *lab {
	t.Helper()
	dir := t.TempDir()
	l := &lab{T: t, api: newFakeAPI(t), lan: kerneltest.NewPod(t), dir: dir, log: &lines{}, stop: func() {}}
	l.options = options{Node: "n1", Config: dir + "/config/config.json", Kubeconfig: l.api.kubeconfig(l.api.server.URL), Plugins: dir + "/plugins", times: usualTimes()}
	for _, sub := range []string{"config", "bin", "net.d", "plugins"} {
		kerneltest.Must(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	for _, p := range programs() {
		l.put("plugins/"+p.from, strings.Repeat(p.from, 100_000))
	}
	config := strings.TrimSuffix(fmt.Sprintf(labConfig, dir), "}") + strings.Join(append([]string{""}, extra...), ", ") + "}"
	l.put("config/config.json", config)
	l.put("config/"+conflistName, testConflist)
	l.wire()
	t.Cleanup(func() {
		l.stop()
		_, err := removeRoutes()
		kerneltest.Must(t, err, os.RemoveAll(store.Root))
		if t.Failed() {
			t.Logf("the log:\n%s", l.log)
		}
	})
	for i := 1; i <= 3; i++ {
		l.api.put(l.peer(i))
	}
	l.api.put(nodeObject("n9", []string{"10.244.9.0/24"}, []string{"198.51.100.9"}))
	return l
}

// peer returns the Node object of node i on the lab's link.
func (l *lab) peer(i int) *corev1.Node {
	return nodeObject(fmt.Sprint("n", i), []string{fmt.Sprintf("10.244.%d.0/24", i), fmt.Sprintf("fd00:10:244:%x::/64", i)},
		[]string{fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("2001:db8::%x", i)})
}

// wire connects the node to the test network with the link up0.
func (l *lab) wire() {
	l.Helper()
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	defer host.Close()
	// With duplicate address detection, link-local addresses are tentative for a second, so the state could change after it was read.
	kerneltest.Must(l, host.Set(kernel.Sysctl{Path: "ipv6/conf/default/accept_dad", Value: "0"}))
	peer, err := os.Open(l.lan.Path)
	kerneltest.Must(l, err)
	defer peer.Close()
	kerneltest.Must(l, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0", MTU: 1500}, PeerName: "lan0",
		PeerNamespace: netlink.NsFd(peer.Fd())}))
	l.Cleanup(func() { _ = netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}}) })
	up := func(link string, ids ...int) error {
		n, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		for _, id := range ids {
			four, _ := netlink.ParseAddr(fmt.Sprintf("192.0.2.%d/24", id))
			six, _ := netlink.ParseAddr(fmt.Sprintf("2001:db8::%x/64", id))
			six.Flags = unix.IFA_F_NODAD
			err = errors.Join(err, netlink.AddrAdd(n, four), netlink.AddrAdd(n, six))
		}
		return errors.Join(err, netlink.LinkSetUp(n))
	}
	kerneltest.Must(l, l.lan.Do(func() error { return up("lan0", 2, 3, 254) }), up("up0", 1))
	l.defaultRoute()
}

// defaultRoute adds a default route through the router. It is called again after a link failure, because the kernel deletes the route with
// the link.
func (l *lab) defaultRoute() {
	l.Helper()
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(l, err)
	kerneltest.Must(l, netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: []byte{192, 0, 2, 254}}))
}

func (l *lab) put(name, text string) {
	l.Helper()
	kerneltest.Must(l, os.WriteFile(filepath.Join(l.dir, name+".tmp"), []byte(text), 0o644),
		os.Rename(filepath.Join(l.dir, name+".tmp"), filepath.Join(l.dir, name)))
}

func (l *lab) read(name string) string {
	data, _ := os.ReadFile(filepath.Join(l.dir, name))
	return string(data)
}

// start runs the agent in the test process until l.stop is called.
func (l *lab) start() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- run(ctx, l.options, slog.New(slog.NewTextHandler(l.log, nil))) }()
	l.stop = func() {
		cancel()
		if err := <-done; err != nil && ctx.Err() == nil {
			l.Error(err)
		}
		l.stop = func() {}
	}
}

func (l *lab) ready() *lab {
	l.Helper()
	l.start()
	l.await("ready", func() bool { return l.status().Ready })
	return l
}

func (l *lab) await(what string, so func() bool) {
	l.Helper()
	await(l.T, what, so)
}

func (l *lab) status() (s Status) {
	data, _ := os.ReadFile(filepath.Join(store.Root, statusName))
	_ = json.Unmarshal(data, &s)
	return s
}

// state returns the state of the routes to a peer's first podCIDR, with the reason.
func (l *lab) state(name string) string {
	for _, p := range l.status().Peers {
		if p.Name == name {
			return strings.TrimSpace(string(p.State) + " " + p.Reason)
		}
	}
	return ""
}

// says reports whether the status has a problem with all the given texts.
func (l *lab) says(parts ...string) bool {
	return slices.ContainsFunc(l.status().Problems, func(p Problem) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(p.What+" "+p.Why+" "+p.Do, part) })
	})
}

// routes returns the agent's routes in the kernel as destination and gateway, such as "10.244.2.0/24 192.0.2.2". Unreachable routes have no
// gateway.
func (l *lab) routes() (list []string) {
	l.Helper()
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	defer host.Close()
	nexthops, err := host.Nexthops()
	kerneltest.Must(l, err)
	gateway := map[uint32]string{}
	for _, h := range nexthops {
		gateway[h.ID] = h.Gateway.String()
	}
	routes, err := host.ProtocolRoutes(noderoutes.Protocol)
	kerneltest.Must(l, err)
	for _, r := range routes {
		list = append(list, strings.TrimSpace(r.Dst.String()+" "+gateway[r.Nexthop]))
	}
	slices.Sort(list)
	return list
}

// full returns the expected routes of n1: those for its own pods, and direct ones to the nodes with the given numbers.
func full(ids ...int) (list []string) {
	list = append(list, "10.244.1.0/24", "fd00:10:244:1::/64")
	for _, id := range ids {
		list = append(list, fmt.Sprintf("10.244.%d.0/24 192.0.2.%d", id, id), fmt.Sprintf("fd00:10:244:%x::/64 2001:db8::%x", id, id))
	}
	slices.Sort(list)
	return list
}

// has waits until the agent's routes in the kernel are exactly those in want.
func (l *lab) has(want []string) {
	l.Helper()
	var got []string
	for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if got = l.routes(); slices.Equal(got, want) {
			return
		}
	}
	l.Fatalf("routes %q, want %q", got, want)
}

func (l *lab) node() (n nodefile.Node) {
	if _, n, err := nodefile.Read(); err == nil {
		return n
	}
	return n
}
