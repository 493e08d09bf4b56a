// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// crashLog is a log handler that simulates a crash of the daemon by a panic in the goroutine that writes the log line.
type crashLog struct {
	slog.Handler
	left *atomic.Int64 // moments until the crash, such as log lines; negative for never
}

// crashPanic is the panic value of a simulated crash.
type crashPanic struct{}

func (c crashLog) Handle(ctx context.Context, r slog.Record) error {
	mayCrash(c.left)
	return c.Handler.Handle(ctx, r)
}

// mayCrash decrements left and panics at zero. The model calls it wherever the daemon may crash.
func mayCrash(left *atomic.Int64) {
	if left.Add(-1) == 0 {
		panic(crashPanic{})
	}
}

// nodeModel is a node whose API server allocates VFs at random. The API server may even allocate one VF to several claims at the same time.
type nodeModel struct {
	kerneltest.Lab
	*draLab
	host   *kernel.Node
	claims []*resourceapi.ResourceClaim
	pods   []*modelPod
	left   *atomic.Int64
	random *rand.Rand
	golden string
	count  map[string]int // successful operations, by kind
	mu     sync.Mutex     // guards count
}

// modelPod is a simulated pod that uses a claim.
type modelPod struct {
	*sandbox.Pod
	name  string
	claim int
	has   bool // it has its VFs, until DEL or Unprepare
}

// newModel returns a node with four VFs and six claims of one or two VFs. Each claim has two pods.
func newModel(t *testing.T) *nodeModel {
	m := &nodeModel{draLab: newDRALab(t), random: kerneltest.Random(t), left: &atomic.Int64{}, count: map[string]int{}}
	m.left.Store(-1)
	must(t, os.RemoveAll("/run/podlace"))
	host, err := kernel.Host()
	must(t, err)
	t.Cleanup(host.Close)
	m.host = host
	for i := range 4 {
		name := fmt.Sprint("ens0f0v", i)
		_, err := host.AddVeth(kernel.Veth{Host: name, Pod: name + "peer", MTU: 1400 + i})
		must(t, err)
		t.Cleanup(func() { must(t, host.DelLink(name), host.DelLink(name+"peer")) })
	}
	m.golden = m.nodeLinks()
	vfs := []string{vf0, vf1, vf2, vf3}
	for i := range 6 {
		uid := fmt.Sprint("c-", i)
		results := []resourceapi.DeviceRequestAllocationResult{deviceResult("a", vfs[i%4])}
		if i%2 == 1 {
			results = append(results, deviceResult("b", vfs[(i+1)%4]))
		}
		m.claims = append(m.claims, newClaim(uid, uid, results...))
		for range 2 {
			m.pods = append(m.pods, &modelPod{Pod: kerneltest.NewPod(t), name: fmt.Sprint("pod-", len(m.pods)), claim: i})
		}
	}
	m.writeAllClaims()
	m.restart()
	m.Lab = kerneltest.Lab{T: t, Pod: m.pods[0].Pod, Conf: kerneltest.Object{"cniVersion": "1.1.0", "name": "net", "type": "sriov",
		"resources": []string{fast}, "kubeletDir": m.options.Kubelet, "prevResult": kerneltest.Object{"cniVersion": "1.1.0",
			"interfaces": []any{kerneltest.Object{"name": "eth0", "sandbox": "/x"}}}}}
	plugin := sriov.PluginAt(m.sysfs, m.answerClaims(), m.options.Claims)
	m.Plugin = func(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
		return plugin.Run(getenv, stdin, stdout, stderr)
	}
	return m
}

// answerClaims serves the socket of the daemon and returns the path of the socket.
func (m *nodeModel) answerClaims() string {
	claims, kubelet := m.options.Claims, m.options.Kubelet // copies, because restart replaces the driver
	dir := filepath.Dir(kubelet)
	socket := filepath.Join(dir, "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	must(m.draLab, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		poddevices.Serve(ctx, listener, func(_ context.Context, q poddevices.Question) poddevices.Answer {
			devices, err := claim.NewCache(claims, kubelet).Find(claim.Pod{Namespace: q.Namespace, Name: q.Pod, UID: q.UID})
			if err != nil {
				return poddevices.Answer{Error: err.Error()}
			}
			return poddevices.Answer{Devices: devices}
		}, slog.New(slog.DiscardHandler))
	}()
	m.Cleanup(func() { cancel(); <-done })
	return socket
}

// writeAllClaims writes the kubelet's file with all claims of the pods.
func (m *nodeModel) writeAllClaims() {
	var list []claimtest.Claim
	for i, c := range m.claims {
		var uids []string
		for _, p := range m.pods {
			if p.claim == i {
				uids = append(uids, "uid-"+p.name)
			}
		}
		list = append(list, claimtest.Claim{UID: string(c.UID), Namespace: "shop", Name: c.Name, Pods: uids})
	}
	must(m.draLab, claimtest.WriteState(m.options.Kubelet, list...))
}

// restart replaces the daemon with a new daemon. The new daemon knows only the data that the old daemon stored in files.
func (m *nodeModel) restart() {
	o := m.options
	o.Log = slog.New(crashLog{slog.NewTextHandler(io.Discard, nil), m.left})
	o.Change = func(_ []string, check, change func() error) error {
		mayCrash(m.left)
		if err := check(); err != nil {
			return err
		}
		mayCrash(m.left)
		err := change()
		mayCrash(m.left)
		return err
	}
	o.Changed = func() { mayCrash(m.left) }
	o.Records = claim.NewCache(o.Claims, o.Kubelet)
	m.Driver = New(o)
	m.updateInventory(pool.Resource{API: pool.DRA}, nil)
}

// nodeLinks describes the VFs that are on the node.
func (m *nodeModel) nodeLinks() string {
	var b strings.Builder
	for i := range 4 {
		link, ok, err := m.host.Link(fmt.Sprint("ens0f0v", i))
		must(m.draLab, err)
		if ok {
			fmt.Fprintf(&b, "%s mac %s mtu %d up %t %v\n", link.Name, link.MAC, link.MTU, link.Up, link.AltNames)
		}
	}
	return b.String()
}

// modelOperation is a random change of a claim or a pod, which returns an error if the daemon behaves wrongly. Several run at the same
// time.
type modelOperation struct {
	name string
	run  func() error
}

func (m *nodeModel) did(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.count[name]++
}

// callGuarded calls f(), which calls the daemon, and recovers from a simulated crash.
func (m *nodeModel) callGuarded(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(crashPanic); !ok {
				panic(r)
			}
			m.did("crash")
			err = fmt.Errorf("crashed")
		}
	}()
	return f()
}

// drawOperations chooses the next operations at random, like the kubelet at most one for each claim at a time. The ADD or DEL of a pod
// may run beside the one on its claim.
func (m *nodeModel) drawOperations() (ops []modelOperation) {
	for _, i := range m.random.Perm(len(m.claims))[:1+m.random.IntN(3)] {
		c, d := m.claims[i], m.Driver
		if m.random.IntN(4) < 3 {
			ops = append(ops, modelOperation{"prepare " + c.Name, func() error {
				if m.callGuarded(func() error { _, err := d.prepare(context.Background(), c, false); return err }) == nil {
					m.did("prepare")
				}
				return nil
			}})
			continue
		}
		for _, p := range m.pods { // stopped pods, with or without a DEL
			if p.claim == i {
				p.has = false
			}
		}
		ops = append(ops, modelOperation{"unprepare " + c.Name, func() error {
			if m.callGuarded(func() error { return d.unprepare(context.Background(), string(c.UID)) }) == nil {
				m.did("unprepare")
			}
			return nil
		}})
	}
	for _, p := range m.drawPods() {
		if m.random.IntN(3) < 2 {
			ops = append(ops, modelOperation{"ADD " + p.name, func() error { return m.add(p) }})
		} else {
			p.has = false
			ops = append(ops, modelOperation{"DEL " + p.name, func() error { return m.del(p) }})
		}
	}
	return ops
}

// drawPods chooses pods at random and prefers pods of prepared claims.
func (m *nodeModel) drawPods() (chosen []*modelPod) {
	for _, i := range m.random.Perm(len(m.pods)) {
		_, err := claim.Read(m.options.Claims, string(m.claims[m.pods[i].claim].UID))
		if err == nil || m.random.IntN(8) == 0 {
			chosen = append(chosen, m.pods[i])
		}
	}
	return chosen[:min(len(chosen), 1+m.random.IntN(3))]
}

func (m *nodeModel) call(verb string, p *modelPod) kerneltest.Outcome {
	return m.Call(verb, p.name, "CNI_NETNS", p.Path, "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME="+p.name+";K8S_POD_UID=uid-"+p.name)
}

// add runs the CNI command ADD for a pod. A failed ADD must leave no VF in the pod. An ADD for a pod that already has its VFs must
// fail.
func (m *nodeModel) add(p *modelPod) error {
	if p.has {
		return nil
	}
	o := m.call("ADD", p)
	if o.Exit != 0 && o.Failure.Code != 11 && o.Failure.Code != 102 && o.Failure.Code != 103 {
		return fmt.Errorf("ADD: %s\n%s", o.Stdout, o.Log)
	}
	if o.Exit == 0 {
		p.has = true
		m.did("ADD")
	}
	return nil
}

func (m *nodeModel) del(p *modelPod) error {
	if o := m.call("DEL", p); o.Exit != 0 {
		return fmt.Errorf("DEL: %s\n%s", o.Stdout, o.Log)
	}
	m.did("DEL")
	return nil
}

// runRound runs several operations at the same time and then checks the node.
func (m *nodeModel) runRound(n int) (happened string, problems []string) {
	kill := m.random.IntN(4) == 0
	ops := m.drawOperations()
	if kill {
		m.left.Store(1 + m.random.Int64N(6))
	}
	errs := make([]error, len(ops))
	var all sync.WaitGroup
	for i, o := range ops {
		happened += fmt.Sprintf("%d: %s\n", n, o.name)
		all.Go(func() { errs[i] = o.run() })
	}
	all.Wait()
	m.left.Store(-1)
	for i, err := range errs {
		if err != nil {
			problems = append(problems, ops[i].name+": "+err.Error())
		}
	}
	for _, o := range ops { // unprepared claims, even if an ADD of their pods ran concurrently
		if name, ok := strings.CutPrefix(o.name, "unprepare "); ok {
			for _, p := range m.pods {
				if m.claims[p.claim].Name == name {
					p.has = false
				}
			}
		}
	}
	if kill {
		m.restart()
	}
	return happened, append(problems, m.problems()...)
}
