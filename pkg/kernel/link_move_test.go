// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestAltNames adds and removes alternative names one by one. Removing one again is no error.
func TestAltNames(t *testing.T) {
	w := newWire(t)
	names := func() []string { return mustLink(t, w.host, "kth0").AltNames }
	kerneltest.Must(t, w.host.AddAltName(w.hostSide, "kt-a-name-that-is-longer-than-15"), w.host.AddAltName(w.hostSide, "kt-b"))
	if diff := cmp.Diff([]string{"kt-a-name-that-is-longer-than-15", "kt-b"}, names()); diff != "" {
		t.Error(diff)
	}
	for _, taken := range []string{"kt-b", "kth0", "kt0"} {
		if err := w.host.AddAltName(w.bridge, taken); !errors.Is(err, unix.EEXIST) {
			t.Errorf("%s: %v", taken, err)
		}
	}
	if err := w.host.DelAltName(w.bridge, "kt-b"); err == nil || !strings.HasPrefix(err.Error(), "link property del dev kt0 altname kt-b: ") {
		t.Errorf("another link's: %v", err)
	}
	for range 2 {
		kerneltest.Must(t, w.host.DelAltName(w.hostSide, "kt-b"))
	}
	if got := names(); !slices.Equal(got, []string{"kt-a-name-that-is-longer-than-15"}) {
		t.Error(got)
	}
}

// TestReceiveModes: Link returns what SetPromisc, SetAllMulti, SetMTU and Rename have set and reset.
func TestReceiveModes(t *testing.T) {
	w := newWire(t)
	for _, on := range []bool{true, false} {
		kerneltest.Must(t, w.pod.SetPromisc(w.podSide, on), w.pod.SetAllMulti(w.podSide, !on))
		if got := mustLink(t, w.pod, "eth0"); got.Promis != on || got.AllMulti == on {
			t.Errorf("%t: %+v", on, got)
		}
	}
	kerneltest.Must(t, w.pod.SetMTU(w.podSide, 1300), w.pod.SetDown(w.podSide), w.pod.Rename(w.podSide, "net1"))
	if got := mustLink(t, w.pod, "net1"); got.Index != w.podSide.Index || got.MTU != 1300 {
		t.Errorf("%+v", got)
	}
	if err := w.pod.Rename(w.podSide, "lo"); !errors.Is(err, unix.EEXIST) {
		t.Error(err)
	}
}

// TestLinkOf: LinkOf finds no link for an unknown device, and a veth has no Device.
func TestLinkOf(t *testing.T) {
	w := newWire(t)
	if link, ok, err := w.pod.LinkOf("0000:3b:11.0"); ok || err != nil || link.Name != "" {
		t.Errorf("%+v, %t, %v", link, ok, err)
	}
	if w.podSide.Device != "" || w.podSide.PermMAC != nil {
		t.Errorf("%+v", w.podSide)
	}
}

// TestMoveLinkBadNamespace: MoveLink into an invalid namespace returns an error and leaves the link.
func TestMoveLinkBadNamespace(t *testing.T) {
	w := newWire(t)
	f, err := os.Open(os.DevNull)
	kerneltest.Must(t, err)
	defer f.Close()
	if err := w.host.MoveLink(w.hostSide, f, "x"); err == nil || err.Error() != "link set kth0 netns /dev/null name x: invalid argument" {
		t.Error(err)
	}
	if got := mustLink(t, w.host, "kth0"); !got.Up {
		t.Errorf("%+v", got)
	}
}

// TestMoveLinkTaken: if the new name is taken, the link stays in its namespace with its old name, whenever the kernel detects the conflict.
func TestMoveLinkTaken(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	own, err := h.File()
	kerneltest.Must(t, err)
	defer own.Close()
	pod, netns := podNS(t)
	addBridge(t, pod, "taken")
	kerneltest.Must(t, pod.AddAltName(mustLink(t, pod, "taken"), "kt-alias"))
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0")) })
	if _, err := h.AddVeth(Veth{Host: "kth0", Pod: "kth1"}); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct{ name, alias string }{
		"its name": {name: "taken"}, "its alternative name": {name: "kt-alias"}, "an alternative name of ours": {"net1", "taken"},
	} {
		link := mustLink(t, h, "kth1")
		if c.alias != "" {
			kerneltest.Must(t, h.AddAltName(link, c.alias))
		}
		if err := h.MoveLink(link, netns, c.name); !errors.Is(err, unix.EEXIST) ||
			!strings.HasPrefix(err.Error(), "link set kth1 netns "+netns.Name()+" name "+c.name+": file exists") {
			t.Errorf("%s: %v", what, err)
		}
		link = mustLink(t, h, "kth1")
		if _, ok, _ := pod.Link("kth1"); ok {
			t.Errorf("%s: it is in the pod", what)
		}
		if c.alias != "" {
			kerneltest.Must(t, h.DelAltName(link, c.alias))
		}
	}
	// The pod has links with the old and the new name, so the kernel detects the conflict before the move.
	addBridge(t, pod, "kth1")
	link := mustLink(t, h, "kth1")
	kerneltest.Must(t, h.SetUp(link))
	if err := h.MoveLink(link, netns, "taken"); err == nil || err.Error() != "link set kth1 netns "+netns.Name()+" name taken: file exists" {
		t.Error(err)
	}
	if got := mustLink(t, h, "kth1"); got.Index != link.Index || !got.Up {
		t.Errorf("it was %+v, and is %+v", link, got)
	}
	// The pod has only a link with the old name, so the move to the pod and the move back succeed.
	kerneltest.Must(t, h.MoveLink(link, netns, "net1"))
	moved := mustLink(t, pod, "net1")
	kerneltest.Must(t, pod.MoveLink(moved, own, "kth1"))
	mustLink(t, h, "kth1")
}

// loadXDP loads a program that passes every frame (XDP_PASS in include/uapi/linux/bpf.h).
func loadXDP(t *testing.T) int32 {
	t.Helper()
	code := []uint64{0x2_0000_00b7, 0x95} // r0 = 2; exit
	license := append([]byte("GPL"), 0)
	attr := struct {
		kind, count   uint32
		code, license uintptr
		rest          [12]uint64
	}{kind: unix.BPF_PROG_TYPE_XDP, count: 2, code: uintptr(unsafe.Pointer(&code[0])), license: uintptr(unsafe.Pointer(&license[0]))}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(code)
	runtime.KeepAlive(license)
	if errno == unix.EPERM || errno == unix.ENOSYS {
		t.Skip("SKIPPED: no BPF in a user namespace, make vm has it: " + errno.Error())
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	t.Cleanup(func() { unix.Close(int(fd)) })
	return int32(fd)
}

func TestNICDelXDP(t *testing.T) {
	w, program := newWire(t), loadXDP(t)
	for _, mode := range []uint32{unix.XDP_FLAGS_SKB_MODE, unix.XDP_FLAGS_DRV_MODE} {
		kerneltest.Must(t, w.pod.setXDP(w.podSide, program, mode))
		link := mustLink(t, w.pod, "eth0")
		if link.XDP == 0 {
			t.Fatalf("flags %d: nothing is attached", mode)
		}
		kerneltest.Must(t, w.pod.DelXDP(link))
		if link = mustLink(t, w.pod, "eth0"); link.XDP != 0 {
			t.Errorf("flags %d: %d is still attached", mode, link.XDP)
		}
	}
}
