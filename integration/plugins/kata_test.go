// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// kataTap is the name of the tap device that Kata creates in a pod.
const kataTap = "tap0_kata"

// virtualMachine is a network namespace behind a pod's tap device, whose interface has the pod's MAC and address.
type virtualMachine struct {
	guest           *sandbox.Pod
	outside, inside *os.File
}

// newKata changes a pod as Kata Containers does with its model "tcfilter": it adds a tap device, and redirects all ingress packets of eth0
// to it and of the tap to eth0.
func newKata(t *testing.T, pod *sandbox.Pod) *virtualMachine {
	t.Helper()
	harness.Program(t, "tc")
	vm := &virtualMachine{guest: harness.NewPod(t, pod.Name+"-vm")}
	var err error
	if vm.outside, err = openTap(pod, kataTap); err != nil {
		t.Skipf("SKIPPED: no tap device here: %v", err)
	}
	t.Cleanup(func() { _ = vm.outside.Close() })
	if vm.inside, err = openTap(vm.guest, "eth0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = vm.inside.Close() })
	harness.Shell(t, fmt.Sprintf(`
		ip -n %[1]s link set %[3]s up
		for pair in eth0/%[3]s %[3]s/eth0; do
			tc -n %[1]s qdisc add dev ${pair%%/*} ingress
			tc -n %[1]s filter add dev ${pair%%/*} parent ffff: protocol all u32 match u8 0 0 action mirred egress redirect dev ${pair#*/}
		done
		mac=$(ip -n %[1]s -o link show dev eth0 | sed 's/.*link.ether \([^ ]*\).*/\1/')
		ip -n %[2]s link set eth0 address $mac up
		ip -n %[2]s addr add $(ip -n %[1]s -4 -o addr show dev eth0 | sed 's/.* inet \([^ ]*\).*/\1/') dev eth0
		ip -n %[1]s -4 route show default | while read -r route; do ip -n %[2]s route add $route; done`, pod.Name, vm.guest.Name, kataTap))
	go relayFrames(vm.outside, vm.inside)
	go relayFrames(vm.inside, vm.outside)
	return vm
}

// removeVM removes the virtual machine with its tap.
func (vm *virtualMachine) removeVM(t *testing.T) {
	t.Helper()
	if err := errors.Join(vm.outside.Close(), vm.inside.Close()); err != nil {
		t.Error(err)
	}
}

// relayFrames emulates the hypervisor: it copies frames between two taps until one is closed.
func relayFrames(from, to *os.File) {
	frame := make([]byte, 1<<16)
	for {
		n, err := from.Read(frame)
		if err != nil {
			return
		}
		if _, err := to.Write(frame[:n]); errors.Is(err, os.ErrClosed) {
			return // a frame is lost if the other end is not ready
		}
	}
}

// openTap creates a tap device in a pod, which exists until the file is closed.
func openTap(pod *sandbox.Pod, name string) (file *os.File, err error) {
	err = pod.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		file = os.NewFile(uintptr(fd), name)
		return nil
	})
	return file, err
}
