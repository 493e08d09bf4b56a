// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	attachments "github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

// A pod runs a server at port 80 and an echo server at port 81.
type pod struct {
	*sandbox.Pod
	attachments []attachment // eth0, then net1
	ips         []string     // of eth0
	side        string       // the address of net1, or ""
	port        int          // hostPort of port 80; the next one leads to port 81; 0 for none
	limits      harness.Rates
	open        []io.Closer
	connections []connection
}

type attachment struct {
	network *harness.Network
	rt      *libcni.RuntimeConf
}

func (a attachment) key() attachments.Key {
	return attachments.Key{Network: a.network.List.Name, ContainerID: a.rt.ContainerID, IfName: a.rt.IfName}
}

// newPod returns the pod of a place, which decides what the pod asks for.
func newPod(t testing.TB, name string, place int) *pod {
	t.Helper()
	p := &pod{limits: []harness.Rates{{Ingress: 40, Egress: 20}, {}, {Egress: 50}, {Ingress: 100}}[place%4]}
	if place%5 != 4 {
		p.port = 20000 + 10*place
	}
	if place%10 < 2 {
		p.side = fmt.Sprint("172.31.0.", place+1)
	}
	var err error
	p.Pod, err = sandbox.NewPod(name)
	kerneltest.Must(t, err)
	return p
}

func (p *pod) capabilities() map[string]any {
	caps := map[string]any{}
	if p.port != 0 {
		caps = harness.Mappings(harness.Port(p.port, 80, "tcp"), harness.Port(p.port, 80, "udp"), harness.Port(p.port+1, 81, "tcp"))
	}
	limits := harness.Object{}
	for way, rate := range map[string]int{"ingress": p.limits.Ingress, "egress": p.limits.Egress} {
		if rate > 0 {
			limits[way+"Rate"], limits[way+"Burst"] = rate*1_000_000, math.MaxUint32
		}
	}
	if len(limits) > 0 {
		caps["bandwidth"] = limits
	}
	return caps
}

// add attaches a new pod.
func (n *node) add(name string, place int) *pod {
	n.Helper()
	p := newPod(n, name, place)
	n.pods = append(n.pods, p)
	p.attachments = []attachment{{n.networks[0], harness.Named(p.Pod, p.capabilities())}}
	result := n.verb("ADD", n.networks[0], p.attachments[0].rt)
	if n.Failed() {
		n.FailNow()
	}
	p.ips = harness.Addresses(n, harness.RawObject(n, string(harness.Encode(result))))
	if p.side != "" {
		rt := harness.Named(p.Pod, nil)
		rt.IfName = "net1"
		p.attachments = append(p.attachments, attachment{n.networks[1], rt})
		n.verb("ADD", n.networks[1], rt)
		harness.Shell(n, fmt.Sprintf("ip -n %s addr add %s/24 dev net1", p.Name, p.side))
	}
	speaker, err := harness.Speak(p.Pod, "[::]:80")
	kerneltest.Must(n, err)
	p.open = append(p.open, speaker, serveEcho(n, p.Pod))
	return p
}

// format returns the format number of the records of a pod's first interface.
func (p *pod) format(t testing.TB) int {
	t.Helper()
	key := p.attachments[0].key()
	records, err := filepath.Glob(filepath.Join(store.Root, key.Network, "*-"+key.Hash()))
	if err != nil || len(records) == 0 {
		t.Fatalf("%s has no record, %v", p.Name, err)
	}
	data, err := os.ReadFile(records[0])
	var record struct{ Format int }
	kerneltest.Must(t, err, json.Unmarshal(data, &record))
	return record.Format
}

// readable returns the pods whose records the installed programs can read. If an older version refuses those of a newer one, it must only
// manage DEL.
func (n *node) readable() []*pod {
	n.Helper()
	list := slices.DeleteFunc(slices.Clone(n.pods), func(p *pod) bool { return p.format(n) > n.installed.format })
	if refused := len(n.pods) - len(list); refused > 0 {
		n.Logf("%s: the %s programs cannot read the records of %d pods, which are left out", n.step, n.installed.name, refused)
	}
	return list
}

// end detaches pods, and checks that nothing of them is left. The namespace of every third pod is gone before DEL.
func (n *node) end(pods ...*pod) {
	n.Helper()
	for i, p := range pods {
		gone := i%3 == 2
		if gone {
			p.close(n)
		}
		for _, a := range slices.Backward(p.attachments) {
			n.verb("DEL", a.network, a.rt)
		}
		if !gone {
			n.checkDetached(p)
		}
		p.close(n)
	}
	n.pods = slices.DeleteFunc(slices.Clone(n.pods), func(p *pod) bool { return slices.Contains(pods, p) })
	n.checkForgotten(pods)
}

// close ends the processes of a pod and removes its namespace.
func (p *pod) close(t testing.TB) {
	t.Helper()
	for _, c := range p.connections {
		_ = c.Close()
	}
	for _, c := range p.open {
		_ = c.Close()
	}
	if _, err := os.Stat(p.Path); err == nil {
		kerneltest.Must(t, p.Close())
	}
}

// checkDetached checks that a pod has lost its interfaces.
func (n *node) checkDetached(p *pod) {
	n.Helper()
	kerneltest.Must(n, p.Do(func() error {
		links, err := net.Interfaces()
		for _, link := range links {
			if link.Name == "eth0" || link.Name == "net1" {
				n.wrong("%s still has %s after DEL", p.Name, link.Name)
			}
		}
		return err
	}))
}

// checkForgotten checks that the node has no link, rule, record or lease of the pods.
func (n *node) checkForgotten(pods []*pod) {
	n.Helper()
	var words []string
	for _, p := range pods {
		words = append(append(words, p.Name), p.ips...)
		for _, a := range p.attachments {
			words = append(words, a.key().HostVeth(), a.key().Hash(), "bwp"+a.key().ReferenceHash()[:12])
		}
	}
	for i, word := range words {
		words[i] = regexp.QuoteMeta(word)
	}
	traces := regexp.MustCompile(`\b(` + strings.Join(words, "|") + `)\b`)
	left := func() (lines []string) {
		state, err := snapshot.Take(snapshot.Options{Dirs: harness.StateDirs(), Ignore: regexp.MustCompile(harness.Harmless)})
		kerneltest.Must(n, err)
		for line := range strings.Lines(state.String()) {
			if traces.MatchString(line) {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		return lines
	}
	for range 100 { // the kernel removes namespaces and their links in the background
		if len(left()) == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	n.wrong("left by ended pods:\n\t%s", strings.Join(left(), "\n\t"))
}
