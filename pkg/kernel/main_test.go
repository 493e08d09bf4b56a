// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func host(t testing.TB) *Node {
	t.Helper()
	n, err := Host()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

func podNS(t testing.TB) (*NS, *os.File) {
	t.Helper()
	f, err := os.Open(kerneltest.NewPod(t).Path)
	if err != nil {
		t.Fatal(err)
	}
	n, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close(); f.Close() })
	return n, f
}

// namespace is what *NS (of a pod) and *Node (of the host) have in common.
type namespace interface {
	Link(name string) (Link, bool, error)
	AddBridge(name string, mac net.HardwareAddr, mtu int, filtered, vlans bool) error
	SetUp(Link) error
	DelLink(name string) error
}

// wire is a bridge on the host, a pod, and a veth pair between them. All links are up and have no addresses.
type wire struct {
	host                      *Node
	pod                       *NS
	bridge, hostSide, podSide Link
}

func newWire(t testing.TB) wire {
	t.Helper()
	kerneltest.Clean(t)
	w := wire{host: host(t)}
	var netns *os.File
	w.pod, netns = podNS(t)
	w.bridge = addBridge(t, w.host, "kt0")
	t.Cleanup(func() { kerneltest.Must(t, w.host.DelLink("kth0")) })
	index, err := w.host.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: netns, Master: w.bridge.Index})
	if err != nil {
		t.Fatal(err)
	}
	w.hostSide, w.podSide = Link{Index: index, Name: "kth0"}, mustLink(t, w.pod, "eth0")
	kerneltest.Must(t, w.pod.Set(Sysctl{"ipv6/conf/eth0/accept_dad", "0"}), w.pod.SetUp(w.podSide), w.host.SetUp(w.hostSide))
	w.hostSide, w.podSide = mustLink(t, w.host, "kth0"), mustLink(t, w.pod, "eth0")
	return w
}

func addBridge(t testing.TB, n namespace, name string) Link {
	t.Helper()
	kerneltest.Must(t, n.AddBridge(name, nil, 0, false, false))
	t.Cleanup(func() { kerneltest.Must(t, n.DelLink(name)) })
	link := mustLink(t, n, name)
	kerneltest.Must(t, n.SetUp(link))
	return link
}

func mustLink(t testing.TB, n namespace, name string) Link {
	t.Helper()
	link, ok, err := n.Link(name)
	if err != nil || !ok {
		t.Fatalf("link %s: %t, %v", name, ok, err)
	}
	return link
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// records returns the lines of a snapshot of the host that contain all parts.
func records(t testing.TB, parts ...string) []string {
	t.Helper()
	return kerneltest.Records(t, parts...)
}
