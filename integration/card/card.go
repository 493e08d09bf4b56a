// SPDX-License-Identifier: Apache-2.0

// Package card gives the network namespace of a test a network card with VFs, for programs that look at /sys and ask the device plugin: veths
// play the interfaces, files the card, and the test says which pod was allocated what.
package card

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci/pcitest"
)

// Resource is that of all VFs.
const Resource = "example.com/fast"

// Address is that of VF i. Its interface is ens0f0v<i>, and the other end of the veth ens0f0v<i>peer.
func Address(i int) string { return fmt.Sprintf("0000:11:02.%d", i) }

// New makes a card of four VFs. The pod shop/web-0 was allocated the first n of them.
func New(t testing.TB, n int) {
	t.Helper()
	sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 4})
	must(t, syscall.Mount(sysfs, "/sys", "", syscall.MS_BIND|syscall.MS_REC, ""))
	t.Cleanup(func() { must(t, syscall.Unmount("/sys", syscall.MNT_DETACH)) })
	devices := []allocation.Device{}
	for i := range 4 {
		addVF(t, fmt.Sprint("ens0f0v", i))
		if i < n {
			devices = append(devices, allocation.Device{Namespace: "shop", Pod: "web-0", Container: "app", Resource: Resource, ID: Address(i)})
		}
	}
	serve(t, devices)
}

func addVF(t testing.TB, name string) {
	t.Helper()
	peer := name + "peer"
	must(t, kernel.WithHost(func(host *kernel.Node) error {
		if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: peer}); err != nil {
			return err
		}
		link, _, err := host.Link(name)
		other, _, err2 := host.Link(peer)
		return errors.Join(err, err2, host.AddAltName(link, "alt-"+name), host.SetUp(other))
	}))
	t.Cleanup(func() { must(t, kernel.WithHost(func(host *kernel.Node) error { return host.DelLink(peer) })) })
}

// serve answers for the device plugin.
func serve(t testing.TB, devices []allocation.Device) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(allocation.Socket), 0o700))
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: allocation.Socket, Net: "unix"})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		allocation.Serve(ctx, listener, func(_ context.Context, q allocation.Question) allocation.Answer {
			return allocation.Answer{Devices: devices, Resources: q.Resources}
		}, slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() { cancel(); <-done; _ = os.Remove(allocation.Socket) })
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
