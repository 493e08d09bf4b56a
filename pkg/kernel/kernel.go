// SPDX-License-Identifier: Apache-2.0

// Package kernel reads and changes Linux networking, except nf_tables (package nft): links, addresses, routes, qdiscs, connection tracking
// and sysctls. Names of methods follow ip(8): a noun changes nothing, a verb makes a change through fault.Change, and one with the prefix
// Ensure is idempotent.
package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

// requestTimeout limits the wait for one reply. Most take microseconds, but deleting a link may take seconds on a busy node.
const requestTimeout = 30 * time.Second

// NS is a handle to a network namespace: that of the process (Host) or of a pod (Open).
type NS struct {
	h *netlink.Handle
	// for netlink requests that netlink.Handle does not support
	sockets map[int]*nl.SocketHandle
	work    chan func() // runs functions on a thread inside the namespace; nil for the own namespace

	sysctls map[string]*os.File // folders below /proc/sys/net, opened on first use
}

// Node is a handle to the namespace of the process, for operations that are possible only there.
type Node struct {
	NS
	NFT nft.Conn // closed with the Node
}

// Host opens the namespace of the process.
func Host() (*Node, error) {
	n := &Node{}
	if err := n.connect(); err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return n, nil
}

func (n *NS) connect() (err error) {
	// Only the family NETLINK_ROUTE: an empty netlink.Handle would silently work in the caller's namespace, and NewHandle without an
	// argument opens a socket for every family, which fails on a kernel without XFRM.
	if n.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		n.h.Close()
		return err
	}
	// The kernel may drop a reply when memory is short, and the request would wait forever.
	limit := unix.NsecToTimeval(requestTimeout.Nanoseconds())
	_ = errors.Join(n.h.SetSocketTimeout(requestTimeout), s.SetSendTimeout(&limit), s.SetReceiveTimeout(&limit))
	// Without this option (since 4.20), the kernel ignores most attributes of a dump request and returns all objects.
	_ = unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	n.sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
	return nil
}

// Namespace is an open network namespace, such as an ns.NetNS of containernetworking/plugins or an *os.File.
type Namespace interface{ Fd() uintptr }

func nameOf(netns Namespace) string {
	switch n := netns.(type) {
	case interface{ Path() string }:
		return n.Path()
	case interface{ Name() string }:
		return n.Name()
	}
	return "of a pod"
}

// Open opens the namespace of a pod, which the caller must have checked to be the pod's.
func Open(netns Namespace) (*NS, error) {
	n := &NS{work: make(chan func())}
	ready := make(chan error)
	go n.serveThread(netns, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return n, nil
}

// serveThread moves its thread into the namespace, opens sockets there, and runs the functions of n.work on it. It never unlocks the
// thread, which therefore ends with the goroutine, so that no other goroutine runs in the wrong namespace. The main thread would keep the
// namespace alive until the process ends, so there serveThread starts another goroutine, which gets another thread because the main one is
// locked.
func (n *NS) serveThread(netns Namespace, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		began := make(chan error)
		go n.serveThread(netns, began)
		err := <-began
		runtime.UnlockOSThread()
		ready <- err
		return
	}
	if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
		ready <- fmt.Errorf("enter namespace %s: %w", nameOf(netns), err)
		return
	}
	if err := n.connect(); err != nil {
		ready <- fmt.Errorf("open netlink socket in %s: %w", nameOf(netns), err)
		return
	}
	ready <- nil
	for f := range n.work {
		f()
	}
}

// Close releases the namespace.
func (n *NS) Close() {
	n.h.Close()
	for _, s := range n.sockets {
		s.Close()
	}
	for _, folder := range n.sysctls {
		folder.Close()
	}
	if n.work != nil {
		close(n.work)
	}
}

// Close releases the namespace. After a deletion in nf_tables, it waits some milliseconds for an RCU grace period of the kernel.
func (n *Node) Close() {
	n.NFT.Close()
	n.NS.Close()
}

// inNamespace runs f on a thread inside the namespace, where /proc/sys/net has its settings.
func (n *NS) inNamespace(f func() error) error {
	if n.work == nil {
		return f()
	}
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}
