// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// NIC is a network card for tests: a real one, or a bridge with veths for VFs. The VFs are down and in the test's namespace.
type NIC struct {
	PF  string // its interface; "" for veths
	VFs []Function
}

// Function is a VF of a real card, or a veth that replaces a VF in a test.
type Function struct {
	Name   string // name of its interface
	Device string // its PCI address; "" for a veth
}

// nicTimeout is the timeout for operations of a network card. The network card of an emulated machine is slow.
const nicTimeout = 30 * time.Second

// FakeNIC returns a card of veths and a bridge until the test ends. It has no PF. The veths reach one another like VFs of a real card.
func FakeNIC(t testing.TB, vfs int) NIC {
	t.Helper()
	add := func(link netlink.Link) {
		if err := netlink.LinkAdd(link); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.LinkDel(link) }) // it may be gone with a pod
	}
	card := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "ktnic"}}
	add(card)
	nic := NIC{}
	up := []netlink.Link{card}
	for i := range vfs {
		f := Function{Name: fmt.Sprintf("ktvf%d", i)}
		port := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("ktport%d", i), MasterIndex: card.Index}, PeerName: f.Name}
		add(port)
		up, nic.VFs = append(up, port), append(nic.VFs, f)
	}
	for _, link := range up {
		if err := netlink.LinkSetUp(link); err != nil {
			t.Fatal(err)
		}
	}
	return nic
}

// RealPF returns the PCI address of a PF that is free for tests, or skips the test.
func RealPF(t testing.TB) string {
	t.Helper()
	if !onMachine() {
		t.Skip("there is no real card: make vm has one, and names it in PODLACE_PF")
	}
	return os.Getenv("PODLACE_PF")
}

// onMachine reports whether the tests run in the virtual machine of "make vm" with a network card. They then use the initial network
// namespace, in which the kernel creates VFs, and to which it returns those of a deleted namespace.
func onMachine() bool {
	cmdline, _ := os.ReadFile("/proc/cmdline")
	return os.Getenv("PODLACE_PF") != "" && strings.Contains(string(cmdline), " podlace.vm=")
}

// RealNIC prepares the card of RealPF with a number of VFs. It waits until all VFs are back from earlier tests' pods, restores their names,
// sets the PF up and waits for its carrier.
func RealNIC(t testing.TB, vfs int) NIC {
	t.Helper()
	device := RealPF(t)
	if count, err := os.ReadFile(sysfs(device, "sriov_numvfs")); err != nil || strings.TrimSpace(string(count)) != strconv.Itoa(vfs) {
		SetNumVFs(t, device, 0)
		SetNumVFs(t, device, vfs)
	}
	nic := NIC{PF: Interface(t, device)}
	if err := netlink.LinkSetUp(&netlink.GenericLink{LinkAttrs: attrs(t, nic.PF)}); err != nil {
		t.Fatal(err)
	}
	Await(t, nic.PF+" has a carrier", func() bool { return attrs(t, nic.PF).OperState == netlink.OperUp })
	for i := range vfs {
		target, err := os.Readlink(sysfs(device, fmt.Sprintf("virtfn%d", i)))
		if err != nil {
			t.Fatal(err)
		}
		f := Function{Name: fmt.Sprintf("ktvf%d", i), Device: filepath.Base(target)}
		link := &netlink.GenericLink{LinkAttrs: attrs(t, Interface(t, f.Device))}
		if err := errors.Join(netlink.LinkSetDown(link), netlink.LinkSetName(link, f.Name)); err != nil {
			t.Fatal(err)
		}
		nic.VFs = append(nic.VFs, f)
	}
	return nic
}

// Rebind unbinds a PCI function from its driver and binds it again.
func Rebind(t testing.TB, device string) {
	t.Helper()
	driver, err := filepath.EvalSymlinks(sysfs(device, "driver"))
	if err == nil {
		err = errors.Join(os.WriteFile(driver+"/unbind", []byte(device), 0o600), os.WriteFile(driver+"/bind", []byte(device), 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// SetNumVFs sets the number of VFs of a PF.
func SetNumVFs(t testing.TB, pf string, n int) {
	t.Helper()
	if err := os.WriteFile(sysfs(pf, "sriov_numvfs"), []byte(strconv.Itoa(n)), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Interface waits until a PCI function has a network interface and returns the interface's name.
func Interface(t testing.TB, device string) (name string) {
	t.Helper()
	Await(t, "an interface of "+device, func() bool {
		list, err := os.ReadDir(sysfs(device, "net"))
		if err == nil && len(list) == 1 {
			name = list[0].Name()
		}
		return name != ""
	})
	return name
}

// Await waits until so returns true. nicTimeout fails the test.
func Await(t testing.TB, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(nicTimeout); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %s in vain: %s", nicTimeout, what)
		}
	}
}

func attrs(t testing.TB, name string) netlink.LinkAttrs {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("link %s: %v", name, err)
	}
	return *link.Attrs()
}

func sysfs(device, file string) string { return filepath.Join("/sys/bus/pci/devices", device, file) }
