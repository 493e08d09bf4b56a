// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestSharedHostPort (F-39): a container has one hostPort in two networks. When one attachment ends, the port moves to the other without a
// lost connection. No other pod gets it before both have ended.
func TestSharedHostPort(t *testing.T) {
	for _, backends := range [][2]string{{"nftables", "nftables"}, {"iptables", "iptables"}, {"nftables", "iptables"},
		{"iptables", "nftables"}} {
		t.Run(backends[0]+" and "+backends[1], func(t *testing.T) {
			harness.NeedBackend(t, "iptables")
			s := newShared(t, backends)
			for _, ends := range []int{0, 1} {
				t.Run(fmt.Sprintf("network %d ends", ends+1), func(t *testing.T) { s.endOneNetwork(t, ends) })
			}
		})
	}
}

// sharedPod is a pod attached to two networks.
type sharedPod struct {
	*behindLab
	networks [2]*harness.Network
	rt       [2]*libcni.RuntimeConf
	backends [2]string
}

func newShared(t *testing.T, backends [2]string) *sharedPod {
	t.Helper()
	// Masquerade every client. Replies for one of eth1 would otherwise leave through eth0, which has the pod's only default route.
	all := strings.NewReplacer(`"snat":true`, `"snat":true,"masqAll":true`)
	second := strings.NewReplacer("chain0", "chain1", `"name":"chain"`, `"name":"second"`, "10.71.", "10.95.", "fd71:", "fd95:",
		`"isDefaultGateway":true`, `"isDefaultGateway":false`)
	b := behindOf(t, all.Replace(string(harness.ChainOf(t, "1.1.0", backends[0]))), harness.HostPort())
	s := &sharedPod{behindLab: b, backends: backends}
	s.networks = [2]*harness.Network{b.Network, openBehind(t, second.Replace(all.Replace(string(harness.ChainOf(t, "1.1.0", backends[1])))))}
	s.rt = [2]*libcni.RuntimeConf{b.rtWeb, harness.Named(b.web, harness.HostPort())}
	s.rt[1].IfName = "eth1"
	t.Cleanup(func() { _, _ = s.networks[1].Do("DEL", s.rt[1], nil) })
	for _, verb := range []string{"ADD", "DEL"} {
		for i, n := range s.networks {
			n.Must(t, verb, s.rt[i])
		}
	}
	b.oracle.Rebase(t)
	return s
}

// endOneNetwork ends one of the pod's two attachments while clients are connecting, and later the other.
func (s *sharedPod) endOneNetwork(t *testing.T, ends int) {
	stays := 1 - ends
	for i, n := range s.networks {
		n.Must(t, "ADD", s.rt[i])
	}
	server, err := harness.Serve(s.web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	// No client uses 127.0.0.1, because the end of an attachment resets route_localnet of the bridge, which breaks its connections.
	clients := []*steadyClient{{from: s.lan, address: harness.NodeV4}, {from: s.lan, address: harness.NodeV6}, {address: harness.NodeV4}}
	stop := startSteady(clients, s.web)
	defer stop()
	for _, c := range clients {
		c.awaitServed(t)
	}
	// Only portmap runs DEL here, because the open connections need the interface.
	conf := object{"cniVersion": "1.1.0", "name": s.networks[ends].List.Name, "type": "portmap", "backend": s.backends[ends]}
	harness.NewCall("DEL", "portmap", s.web, s.rt[ends].ContainerID, conf).With("CNI_IFNAME", s.rt[ends].IfName).Run(t).OK(t)
	for _, c := range clients {
		c.awaitServed(t)
	}
	stop()
	s.networks[ends].Must(t, "DEL", s.rt[ends])
	s.networks[stays].Must(t, "CHECK", s.rt[stays])
	for _, n := range s.networks {
		s.rtClient.CapabilityArgs = harness.HostPort()
		var refused *types.Error
		if _, err := n.Do("ADD", s.rtClient, nil); !errors.As(err, &refused) || refused.Code != 104 ||
			!strings.Contains(refused.Msg, s.web.Name) {
			t.Errorf("ADD of another pod with the same port in network %s: %v", n.List.Name, err)
		}
		n.Must(t, "DEL", s.rtClient)
	}
	s.networks[stays].Must(t, "CHECK", s.rt[stays])
	harness.Reach(t, s.lan, net.JoinHostPort(harness.NodeV4, "8080"), s.web)
	harness.Reach(t, nil, "127.0.0.1:8080", s.web)
	s.networks[stays].Must(t, "DEL", s.rt[stays])
	s.oracle.Clean(t, "a pod left two networks")
}

type steadyClient struct {
	from    *sandbox.Pod
	address string
	served  atomic.Int64 // number of connections that the pod answered
	lost    atomic.Pointer[error]
}

// awaitServed waits until the pod has answered five more connections of this client.
func (c *steadyClient) awaitServed(t *testing.T) {
	t.Helper()
	for enough := c.served.Load() + 5; c.served.Load() < enough; time.Sleep(time.Millisecond) {
		if lost := c.lost.Load(); lost != nil {
			t.Fatalf("%s -> %s lost a connection: %v", harness.NameOf(c.from), c.address, *lost)
		}
	}
}

// startSteady lets the clients connect to the pod until the returned function is called. A client ends after its first lost connection.
func startSteady(clients []*steadyClient, to *sandbox.Pod) (stop func()) {
	var wait sync.WaitGroup
	var done atomic.Bool
	for _, c := range clients {
		wait.Go(func() {
			for !done.Load() {
				got, err := harness.Dial(c.from, net.JoinHostPort(c.address, "8080"), harness.CallLimit)
				if err == nil && got != to.Name {
					err = fmt.Errorf("%q answers", got)
				}
				if err != nil {
					c.lost.Store(&err)
					return
				}
				c.served.Add(1)
			}
		})
	}
	return sync.OnceFunc(func() { done.Store(true); wait.Wait() })
}
