// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// queuedAddresses is how many addresses fillQueues adds to each CPU's work queue. Each takes the kernel some microseconds.
const queuedAddresses = 300

// DelayAddresses returns fill, which fills the kernel's work queue for IPv6 addresses on each CPU, as on a busy node, from a separate
// namespace. The kernel then answers neighbour solicitations for a new address only after some milliseconds.
func DelayAddresses(t testing.TB) (fill func()) {
	t.Helper()
	pod := NewPod(t)
	for cpu := range runtime.NumCPU() {
		if err := pod.Do(func() error { return addQueue(queueName(cpu)) }); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		if err := fillQueues(pod); err != nil {
			t.Fatal(err)
		}
	}
}

func queueName(cpu int) string { return fmt.Sprint("queue", cpu) }

// addQueue creates a link with queuedAddresses addresses. The link keeps its addresses while it is down.
func addQueue(name string) error {
	link := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
	if err := netlink.LinkAdd(link); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/keep_addr_on_down", []byte("1"), 0); err != nil {
		return err
	}
	for i := range queuedAddresses {
		ip := net.IP{0xfd, 15: byte(i)}
		ip[14] = byte(i >> 8)
		ip[1] = byte(link.Index)
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(128, 128)}, Flags: unix.IFA_F_NODAD}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
	}
	return nil
}

// fillQueues sets up one link on each CPU, to whose work queue the kernel then adds the link's addresses.
func fillQueues(pod *sandbox.Pod) error {
	results := make(chan error)
	cpus := runtime.NumCPU()
	for cpu := range cpus {
		go func() {
			results <- pod.Do(func() error {
				var only unix.CPUSet
				only.Set(cpu)
				_ = unix.SchedSetaffinity(0, &only) // CPUs may have other numbers; then another CPU's queue is filled
				link, err := netlink.LinkByName(queueName(cpu))
				if err != nil {
					return err
				}
				return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetUp(link))
			})
		}()
	}
	var err error
	for range cpus {
		err = errors.Join(err, <-results)
	}
	return err
}
