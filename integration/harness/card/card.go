// SPDX-License-Identifier: Apache-2.0

// Package card simulates a network card with VFs in a test's network namespace, by veth pairs, files in place of sysfs, and a server in
// place of the device plugin. Tests choose the pod's VFs. The tested programs read /sys and connect to the device plugin as usual.
package card

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/poddevices"
)

// Resource is the resource name of all VFs.
const Resource = "example.com/fast"

// The simulated device plugin allocates VFs only to the pod shop/web-0.
const podNamespace, podName = "shop", "web-0"

const vfCount = 4

// Address returns the PCI address of VF i. Its interface is ens0f0v<i>, and the veth pair's other end is ens0f0v<i>peer.
func Address(i int) string { return fmt.Sprintf("0000:11:02.%d", i) }

// Name returns the name of the interface of VF i on the node.
func Name(i int) string { return fmt.Sprint(pfName, "v", i) }

const pfName = "ens0f0"

func peerOf(i int) string { return Name(i) + "peer" }

// Card is the simulated network card of the node.
type Card struct {
	testing.TB
	mutex   sync.Mutex
	devices []poddevices.Device
	claims  *claim.Cache // nil for a node without claims
}

// New creates a card with four VFs, and allocates the first n VFs to the pod shop/web-0.
func New(t testing.TB, n int) *Card {
	t.Helper()
	c := &Card{TB: t}
	sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: vfCount})
	must(t, syscall.Mount(sysfs, "/sys", "", syscall.MS_BIND|syscall.MS_REC, ""))
	t.Cleanup(func() { must(t, syscall.Unmount("/sys", syscall.MNT_DETACH)) })
	var first []int
	for i := range vfCount {
		addVF(t, Name(i))
		if i < n {
			first = append(first, i)
		}
	}
	c.Allocate(first...)
	c.serveDevices()
	return c
}

// Allocate sets the VFs of the pod shop/web-0 and replaces an earlier allocation.
func (c *Card) Allocate(vfs ...int) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.devices = nil
	for _, i := range vfs {
		c.devices = append(c.devices, poddevices.Device{Namespace: podNamespace, Pod: podName, Container: "app", Resource: Resource,
			ID: Address(i)})
	}
}

// Claim adds VFs of prepared ResourceClaims to the simulated device plugin's responses, which come from the records in claim.Folder.
// kubelet is the kubelet's root folder.
func (c *Card) Claim(kubelet string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.claims = claim.NewCache(claim.Folder, kubelet)
}

func (c *Card) answerQuestion(_ context.Context, q poddevices.Question) poddevices.Answer {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var a poddevices.Answer
	if q.Namespace == podNamespace && q.Pod == podName {
		a.Devices = slices.Clone(c.devices)
	}
	if c.claims == nil {
		return a
	}
	claimed, err := c.claims.Find(claim.Pod{Namespace: q.Namespace, Name: q.Pod, UID: q.UID})
	if err != nil {
		return poddevices.Answer{Error: err.Error()}
	}
	claimed, a.Others = claim.Split(claimed, q.Resources)
	a.Devices = append(a.Devices, claimed...)
	return a
}

// writeNames creates a device's folder "net" in the simulated sysfs, with an entry for each interface.
func writeNames(folder string, names []string) error {
	err := os.RemoveAll(folder)
	for _, name := range names {
		at := filepath.Join(folder, name)
		err = errors.Join(err, os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, "type"), []byte("1\n"), 0o600))
	}
	return err
}

func openHost(t testing.TB) *kernel.Node {
	t.Helper()
	host, err := kernel.Host()
	must(t, err)
	return host
}

func addVF(t testing.TB, name string) {
	t.Helper()
	host := openHost(t)
	defer host.Close()
	peer := name + "peer"
	_, err := host.AddVeth(kernel.Veth{Host: name, Pod: peer})
	must(t, err)
	link, _, err := host.Link(name)
	other, _, err2 := host.Link(peer)
	must(t, err, err2, host.AddAltName(link, "alt-"+name), host.SetUp(other))
	t.Cleanup(func() {
		host := openHost(t)
		defer host.Close()
		must(t, host.DelLink(peer))
	})
}

// Leave moves a VF's interface to the node, as the kernel does when it removes the pod's namespace. It is then down, and has a generated
// name if its own is taken. Call it before the namespace is closed, because the kernel then deletes a veth pair.
func Leave(t testing.TB, netns, name string) {
	t.Helper()
	host := openHost(t)
	defer host.Close()
	from, err := os.Open(netns)
	must(t, err)
	defer from.Close()
	pod, err := kernel.Open(from)
	must(t, err)
	defer pod.Close()
	home, err := host.File()
	must(t, err)
	defer home.Close()
	link, ok, err := pod.Link(name)
	if must(t, err); !ok {
		t.Fatalf("%s has no %s", netns, name)
	}
	isTaken := func(name string) bool {
		_, taken, err := host.Link(name)
		must(t, err)
		return taken
	}
	for _, other := range link.AltNames { // default_device_exit_net in net/core/dev.c removes alternative names that exist on the node
		if isTaken(other) {
			must(t, pod.DelAltName(link, other))
		}
	}
	for i := 0; isTaken(name); i++ {
		name = fmt.Sprint("dev", i)
	}
	must(t, pod.SetDown(link), pod.MoveLink(link, home, name))
	Tell(t)
}

// Tell writes the current names of the VFs' interfaces to the simulated sysfs between plugin calls, because the kernel updates only the
// real one. The original names are always there, because a plugin looks for them right after it has moved an interface back.
func Tell(t testing.TB) {
	t.Helper()
	host := openHost(t)
	defer host.Close()
	all, err := net.Interfaces()
	must(t, err)
	strange := map[int]string{} // by the peer's index
	for _, each := range all {
		if strings.HasPrefix(each.Name, pfName) { // a VF with its original name, or a peer
			continue
		}
		link, ok, err := host.LinkByIndex(each.Index)
		if must(t, err); ok && link.Peer != 0 {
			strange[link.Peer] = link.Name
		}
	}
	for i := range vfCount {
		peer, err := net.InterfaceByName(peerOf(i))
		must(t, err)
		names := []string{Name(i)}
		if name := strange[peer.Index]; name != "" {
			names = append(names, name)
		}
		must(t, writeNames(filepath.Join(pcitest.Folder(t, "/sys", Address(i)), "net"), names))
	}
}

func (c *Card) serveDevices() {
	c.Helper()
	must(c, os.MkdirAll(filepath.Dir(poddevices.Socket), 0o700))
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: poddevices.Socket, Net: "unix"})
	must(c, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		poddevices.Serve(ctx, listener, c.answerQuestion, slog.New(slog.DiscardHandler))
	}()
	c.Cleanup(func() { cancel(); <-done; _ = os.Remove(poddevices.Socket) })
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
