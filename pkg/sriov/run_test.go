// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// TestMain also runs the program that asks the kubelet, if the plugin starts this test binary by its name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == poddevices.Program {
		os.Exit(podresources.Main(nil, os.Stdin, os.Stdout))
	}
	kerneltest.Main(m)
}

type (
	object  = kerneltest.Object
	outcome = kerneltest.Outcome
)

// vf0, vf1 and vf2 are VFs of the card, whose PF has the interface ens0f0. In the fake sysfs, their interfaces are veths.
const (
	vf0, vf1, vf2 = "0000:11:02.0", "0000:11:02.1", "0000:11:02.2"
	fast, slow    = "example.com/fast", "example.com/slow"
)

// testLab is a node with a device plugin, a pod, and a card that has four VFs.
type testLab struct {
	kerneltest.Lab
	sriov   *sriov
	host    *kernel.Node
	devices *[]poddevices.Device
	refusal *poddevices.Answer // error of the device plugin
	served  *atomic.Pointer[knowledge]
	golden  string
	card    func() string // describes the card if it is a real one
}

// knowledge is what the device plugin answers from. Its socket is served beside the test, so it gets a copy before each call.
type knowledge struct {
	devices []poddevices.Device
	refusal poddevices.Answer
}

func (l testLab) publish() {
	l.served.Store(&knowledge{slices.Clone(*l.devices), *l.refusal})
}

// newLab returns a test lab in which the plugin runs after another one in a chain. At the end, all VFs must be restored and no state of
// the plugin may remain.
func newLab(t *testing.T, keys ...any) testLab {
	t.Helper()
	must(t, os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni"))
	host, err := kernel.Host()
	must(t, err)
	t.Cleanup(host.Close)
	l := unsetLab(t, host)
	l.Pod = kerneltest.NewPod(t)
	*l.sriov = sriov{ipam.Runner{Builtin: []plugin.Plugin{hostlocal.Plugin()}}, pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 4}), "",
		filepath.Join(t.TempDir(), "claims")}
	l.serveSocket()
	for i := range 4 {
		name := fmt.Sprint("ens0f0v", i)
		l.addVF(name, 1400+i)
		t.Cleanup(func() { must(t, host.DelLink(name), host.DelLink(name+"peer")) })
	}
	l.golden = l.nodeLinks()
	l.Conf = object{"cniVersion": "1.1.0", "name": "net", "type": "sriov", "resources": []string{fast, slow}, "kubeletDir": "/run/no-kubelet",
		"prevResult": object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "sandbox": l.Pod.Path}},
			"ips": []any{object{"address": "10.1.0.5/24", "interface": 0}}}}.With(keys...)
	kerneltest.Clean(t, l.Pod)
	return l
}

// unsetLab returns a test lab without VFs, pod and configuration.
func unsetLab(t *testing.T, host *kernel.Node) testLab {
	t.Helper()
	l := testLab{sriov: &sriov{}, host: host, devices: &[]poddevices.Device{},
		refusal: &poddevices.Answer{}, served: &atomic.Pointer[knowledge]{}}
	programs := t.TempDir()
	test, err := os.Executable()
	must(t, err, os.Symlink(test, filepath.Join(programs, poddevices.Program)))
	env := map[string]string{"CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0", "CNI_PATH": programs}
	l.Lab = kerneltest.Lab{T: t, Env: env,
		Plugin: func(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
			l.publish()
			return l.sriov.plugin().Run(getenv, stdin, stdout, stderr)
		}}
	return l
}

// addVF creates the interface of a VF with settings of an admin.
func (l testLab) addVF(name string, mtu int) {
	l.Helper()
	_, err := l.host.AddVeth(kernel.Veth{Host: name, Pod: name + "peer", MTU: mtu})
	must(l, err)
	link := l.link(name)
	must(l, l.host.SetUp(l.link(name+"peer")), l.host.AddAltName(link, "alt-"+name), l.host.AddAltName(link, "other-"+name))
	if mtu == 1401 {
		must(l, l.host.SetAllMulti(link, true), l.host.SetAlias(link, "uplink of the lab"), l.host.SetUp(link))
	}
}

func (l *testLab) serveSocket() {
	l.Helper()
	dir, err := filepath.Dir(l.sriov.socket), error(nil)
	if l.sriov.socket == "" {
		dir, err = os.MkdirTemp("", "vf")
		l.sriov.socket = filepath.Join(dir, "s")
	}
	must(l, err)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: l.sriov.socket, Net: "unix"})
	must(l, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	l.publish()
	served := l.served
	go func() {
		defer close(done)
		poddevices.Serve(ctx, listener, func(_ context.Context, q poddevices.Question) poddevices.Answer {
			know := served.Load()
			if know.refusal.Error != "" {
				return know.refusal
			}
			var a poddevices.Answer
			for _, d := range know.devices {
				if d.Claim != nil && !slices.Contains(q.Resources, d.Resource) {
					a.Others = append(a.Others, d)
				} else {
					a.Devices = append(a.Devices, d)
				}
			}
			return a
		}, slog.New(slog.DiscardHandler))
	}()
	l.Cleanup(func() { cancel(); <-done; os.RemoveAll(dir) })
}

// allocate allocates VFs of the test resource to the pod.
func (l testLab) allocate(addresses ...string) {
	*l.devices = nil
	for _, a := range addresses {
		*l.devices = append(*l.devices, poddevices.Device{Namespace: "shop", Pod: "web-0", Container: "app", Resource: fast, ID: a})
	}
}

func (l testLab) otherPod() testLab {
	l.Helper()
	l.Pod = kerneltest.NewPod(l.T)
	return l
}

// attachedPod is a pod with the result of its ADD.
type attachedPod struct {
	testLab
	id     string
	prev   json.RawMessage
	result types100.Result
}

func (l testLab) add(id string, keys ...any) attachedPod {
	l.Helper()
	a := attachedPod{testLab: l, id: id, prev: l.OK(l.Call("ADD", id, keys...)).Stdout}
	must(l, json.Unmarshal(a.prev, &a.result))
	return a
}

func (a attachedPod) check(keys ...any) outcome {
	a.Helper()
	return a.Call("CHECK", a.id, append([]any{"prevResult", a.prev}, keys...)...)
}

// del runs DEL and checks that all VFs are restored.
func (l testLab) del(id string, keys ...any) {
	l.Helper()
	l.OK(l.Call("DEL", id, keys...))
	l.isGolden()
}

func (l testLab) isGolden() {
	l.Helper()
	if diff := cmp.Diff(l.golden, l.nodeLinks()); diff != "" {
		l.Errorf("the VFs differ from before: %s", diff)
	}
	if all, err := Holdings(); err != nil || len(all) > 0 {
		l.Errorf("journals are left: %+v, %v", all, err)
	}
}

// nodeLinks describes the VFs' interfaces that are on the node.
func (l testLab) nodeLinks() string {
	l.Helper()
	if l.card != nil {
		return l.card()
	}
	var b strings.Builder
	for i := range 4 {
		link, ok, err := l.host.Link(fmt.Sprint("ens0f0v", i))
		must(l, err)
		if ok {
			features, err := pci.Features(link.Name)
			must(l, err)
			b.WriteString(describe(link) + " features " + strings.Join(features, ",") + "\n")
		}
	}
	return b.String()
}

func describe(link kernel.Link) string {
	return fmt.Sprintf("%s %q %q mac %s mtu %d promisc %t allmulti %t txqueuelen %d up %t %+v", link.Name, link.AltNames, link.Alias, link.MAC,
		link.MTU, link.Promis, link.AllMulti,
		link.TxQueue, link.Up, link.Traits)
}

func (l testLab) link(name string) kernel.Link {
	l.Helper()
	link, ok, err := l.host.Link(name)
	if err != nil || !ok {
		l.Fatalf("link %s: %t, %v", name, ok, err)
	}
	return link
}

// inPod calls f in the network namespace of the pod.
func (l testLab) inPod(f func(*kernel.NS)) {
	l.Helper()
	netns, err := os.Open(l.Pod.Path)
	must(l, err)
	defer netns.Close()
	pod, err := kernel.Open(netns)
	must(l, err)
	defer pod.Close()
	f(pod)
}

func (l testLab) podLink(name string) (link kernel.Link) {
	l.Helper()
	l.inPod(func(pod *kernel.NS) {
		var ok bool
		var err error
		if link, ok, err = pod.Link(name); !ok || err != nil {
			l.Fatalf("link %s: %t, %v", name, ok, err)
		}
	})
	return link
}

func address(t testing.TB, s string) pci.Address {
	t.Helper()
	a, err := pci.ParseAddress(s)
	must(t, err)
	return a
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
