// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

// trafficLimit is far more than any reply takes.
const trafficLimit = 10 * time.Second

// The node and a peer in its network. The peer has no route to pods, so they get replies only with masquerade.
var (
	nodeAddresses = []string{"203.0.113.1", "2001:db8:113::1"}
	peerAddresses = []string{"203.0.113.2", "2001:db8:113::2"}
)

// newPeer creates the peer, whose server sends each client the client's own address.
func newPeer(t *testing.T) *sandbox.Pod {
	t.Helper()
	peer := newPod(t, "peer")
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	t.Cleanup(func() {
		if host, err := kernel.Host(); err == nil {
			_ = host.DelLink("up0")
			host.Close()
		}
	})
	netns, err := os.Open(peer.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: "up0", Pod: "eth0", Netns: netns}); err != nil {
		t.Fatal(err)
	}
	in, err := kernel.Open(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	plug(t, &host.NS, "up0", nodeAddresses)
	plug(t, in, "eth0", peerAddresses)
	for _, address := range peerAddresses {
		tellAddresses(t, peer, net.JoinHostPort(address, "9000"))
	}
	return peer
}

func plug(t *testing.T, ns *kernel.NS, name string, addresses []string) {
	t.Helper()
	link, _, err := ns.Link(name)
	if err != nil {
		t.Fatal(err)
	}
	errs := []error{ns.Set(kernel.Sysctl{Path: "ipv6/conf/" + name + "/accept_dad", Value: "0"})}
	for i, a := range addresses {
		errs = append(errs, ns.AddAddress(link, netip.MustParsePrefix(fmt.Sprintf("%s/%d", a, []int{24, 64}[i])), false))
	}
	if err := errors.Join(append(errs, ns.SetUp(link))...); err != nil {
		t.Fatal(err)
	}
}

// tellAddresses starts a server in the pod that answers each line with the client's address.
func tellAddresses(t *testing.T, pod *sandbox.Pod, address string) {
	t.Helper()
	var l net.Listener
	err := pod.Do(func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				client, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				for lines := bufio.NewReader(c); ; {
					if _, err := lines.ReadString('\n'); err != nil {
						return
					}
					if _, err := fmt.Fprintln(c, client); err != nil {
						return
					}
				}
			}()
		}
	}()
}

func dialFrom(pod *sandbox.Pod, address string) (c net.Conn, err error) {
	err = pod.Do(func() error {
		c, err = net.DialTimeout("tcp", address, trafficLimit)
		return err
	})
	return c, err
}

// exchangeLine sends a line on an open connection and compares the reply.
func exchangeLine(c net.Conn, want string) error {
	if err := c.SetDeadline(time.Now().Add(trafficLimit)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "who am I\n"); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if got := strings.TrimSpace(line); err == nil && want != "" && got != want {
		err = fmt.Errorf("the peer sees %s, want %s", got, want)
	}
	return err
}

// exchangeOnce opens a connection for one line and compares the reply.
func exchangeOnce(pod *sandbox.Pod, address, want string) error {
	c, err := dialFrom(pod, address)
	if err != nil {
		return err
	}
	defer c.Close()
	return exchangeLine(c, want)
}

// podTraffic sends from a pod without a pause, with one long-lived connection and repeated short ones for each address family.
type podTraffic struct {
	t      *testing.T
	rounds atomic.Int64
	quit   chan struct{}
	done   chan error
}

func startStream(t *testing.T, pod *sandbox.Pod) *podTraffic {
	t.Helper()
	s := &podTraffic{t: t, quit: make(chan struct{}), done: make(chan error, 1)}
	var conns []net.Conn
	for i, a := range peerAddresses {
		c, err := dialFrom(pod, net.JoinHostPort(a, "9000"))
		if err != nil {
			t.Fatalf("pod to %s: %v", a, err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if err := exchangeLine(c, nodeAddresses[i]); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	go func() {
		s.done <- func() error {
			for {
				for i, c := range conns {
					err := errors.Join(exchangeLine(c, nodeAddresses[i]), exchangeOnce(pod, net.JoinHostPort(peerAddresses[i], "9000"), nodeAddresses[i]))
					if err != nil {
						return err
					}
				}
				s.rounds.Add(1)
				select {
				case <-s.quit:
					return nil
				default:
				}
			}
		}()
	}()
	return s
}

// awaitRounds waits for several more rounds on all connections.
func (s *podTraffic) awaitRounds() {
	s.t.Helper()
	for want := s.rounds.Load() + 5; s.rounds.Load() < want; time.Sleep(time.Millisecond) {
		select {
		case err := <-s.done:
			s.t.Fatalf("the pod's traffic stopped: %v", err)
		default:
		}
	}
}

func (s *podTraffic) stop() {
	s.t.Helper()
	close(s.quit)
	if err := <-s.done; err != nil {
		s.t.Errorf("the pod's traffic stopped: %v", err)
	}
}

func oracleOptions() snapshot.Options {
	return snapshot.Options{Dirs: []string{"/run/podlace", "/var/lib/cni"},
		Ignore: regexp.MustCompile(`last_reserved_ip|/podlace_boot|/\.?lock|\.masqueraded|\.iptables`)}
}

func takeSnapshot(t *testing.T) *snapshot.Snapshot {
	t.Helper()
	s, err := snapshot.Take(oracleOptions())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// createSharedState runs ADD and DEL of a pod in each network, so that the first snapshot has the state that all pods share.
func createSharedState(t *testing.T, networks ...testNetwork) {
	t.Helper()
	for i, n := range networks {
		id := fmt.Sprint("warm", i)
		pod := newPod(t, id)
		n.mustAdd(t, id, pod)
		n.del(t, id, pod)
	}
}

// TestTakeOver (F-44): Podlace's DEL removes all state of pods that the reference plugins attached, with their namespace present, deleted,
// or not passed. Four cases run, or with FAULTS=all those of each firewall backend. While the plugins are replaced and other pods come and
// go, traffic of running pods continues (F-43). CHECK succeeds even if the new configuration has antiSpoof.
func TestTakeOver(t *testing.T) {
	reference := needReference(t)
	for i, c := range []struct{ backends, netns string }{
		{"unset", "live"}, {"nftables", "live"}, {"unset", "gone"}, {"nftables", "empty"},
		{"iptables", "live"}, {"unset", "empty"}, {"nftables", "gone"},
	}[:harness.Some(4, 7)] {
		t.Run(c.backends+"/"+c.netns, func(t *testing.T) {
			edits := withSpoofCheck(c.backends == "nftables" && c.netns == "live")
			theirs := mixedNetwork(t, c.backends, reference, 7200+i, edits...)
			ours := theirs.withPlugins(harness.BinDir())
			t.Cleanup(func() { theirs.removeState(t) })
			guarded := mixedNetwork(t, c.backends, harness.BinDir(), 7200+i, antiSpoof()...)
			guarded.cache = theirs.cache
			guarded = guarded.withPlugins(harness.BinDir())
			peer := newPeer(t)
			createSharedState(t, theirs, ours, guarded)
			before := takeSnapshot(t)

			old := newPod(t, "old")
			listen := firstAddress(t, theirs.mustAdd(t, "old", old))
			tellAddresses(t, old, net.JoinHostPort(listen, "80"))
			traffic := startStream(t, old)
			hostPort := net.JoinHostPort(nodeAddresses[0], fmt.Sprint(7200+i))
			other := mixedNetwork(t, c.backends, harness.BinDir(), 7250+i, edits...)
			for _, id := range []string{"new1", "new2"} {
				fresh := newPod(t, id)
				other.mustAdd(t, id, fresh)
				if err := errors.Join(ours.check(t, "old", old), guarded.check(t, "old", old), other.check(t, id, fresh),
					exchangeOnce(peer, hostPort, peerAddresses[0])); err != nil {
					t.Error(err)
				}
				traffic.awaitRounds()
				other.del(t, id, fresh)
				traffic.awaitRounds()
			}
			if err := errors.Join(ours.check(t, "old", old), exchangeOnce(peer, hostPort, peerAddresses[0])); err != nil {
				t.Error(err)
			}
			traffic.stop()
			endAs(t, ours, c.netns, "old", old)
			kerneltest.NoLeak(t, before, oracleOptions())
		})
	}
}

// TestTakeOverVariants (F-44): Podlace's DEL also removes what only some configurations of the reference plugins create, such as rules of
// macspoofchk.
func TestTakeOverVariants(t *testing.T) {
	reference := needReference(t)
	spoof := withSpoofCheck(true)
	for what, c := range map[string]struct {
		netns string
		edits []string
	}{
		"macspoofchk/live":  {"live", spoof},
		"macspoofchk/empty": {"empty", spoof},
		"antiSpoof":         {"live", antiSpoof()},
		"0.3.1":             {"live", []string{`"1.0.0"`, `"0.3.1"`}}, // no prevResult at DEL
		"edited":            {"live", []string{`"ipMasq": true, `, ``}},
	} {
		t.Run(what, func(t *testing.T) {
			added := c.edits
			if what == "edited" {
				added = nil // the edits apply only at DEL
			}
			theirs := mixedNetwork(t, "unset", reference, 7280, added...)
			t.Cleanup(func() { theirs.removeState(t) })
			ours := mixedNetwork(t, "unset", harness.BinDir(), 7280, c.edits...)
			ours.cache = theirs.cache
			ours = ours.withPlugins(harness.BinDir())
			createSharedState(t, theirs)
			before := takeSnapshot(t)
			old := newPod(t, "old")
			theirs.mustAdd(t, "old", old)
			endAs(t, ours, c.netns, "old", old)
			kerneltest.NoLeak(t, before, oracleOptions())
			if c.netns == "live" && hasLink(t, old, "eth0") {
				t.Error("the pod still has its interface")
			}
		})
	}
}

func hasLink(t *testing.T, pod *sandbox.Pod, name string) (found bool) {
	t.Helper()
	err := pod.Do(func() error {
		_, err := net.InterfaceByName(name)
		found = err == nil
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func withSpoofCheck(on bool) []string {
	if !on {
		return nil
	}
	return []string{`"ipMasq"`, `"macspoofchk": true, "ipMasq"`}
}

func antiSpoof() []string { return []string{`"ipMasq"`, `"antiSpoof": true, "ipMasq"`} }

// endAs runs DEL twice. With netns "empty", it gets no namespace; with "gone", the namespace is deleted first.
func endAs(t *testing.T, n testNetwork, netns, id string, pod *sandbox.Pod) {
	t.Helper()
	switch netns {
	case "empty":
		pod = &sandbox.Pod{Name: pod.Name}
	case "gone":
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	n.del(t, id, pod)
	n.del(t, id, pod)
}
