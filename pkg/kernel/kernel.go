// SPDX-License-Identifier: Apache-2.0

// Package kernel reads and changes Linux networking: links, addresses, routes, qdiscs, connection tracking and sysctls. Package nft reads
// and changes nf_tables. Method names follow ip(8). A method whose name is a noun changes nothing. A method whose name is a verb makes a
// change. Methods with the prefix Ensure are idempotent. Each method makes its changes through fault.Change.
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

// requestTimeout is the timeout for one reply of the kernel. Most replies take microseconds, but deleting a link may take seconds on a busy
// node.
const requestTimeout = 30 * time.Second

// NS is a handle to a network namespace. The function Host returns a handle to the namespace of the process. The function Open returns a
// handle to the namespace of a pod.
type NS struct {
	h *netlink.Handle
	// These sockets are for netlink requests that netlink.Handle does not support.
	sockets map[int]*nl.SocketHandle
	work    chan func() // runs functions on a thread inside the namespace; nil for the own namespace

	sysctls map[string]*os.File // folders below /proc/sys/net, opened on first use
}

// Node is a handle to the namespace of the process. Some operations of Node are possible only in this namespace.
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
	// The handle must have exactly the family NETLINK_ROUTE. An empty netlink.Handle would silently work in the caller's namespace. Without an
	// argument, NewHandle opens a socket for every family, which fails on a kernel without XFRM.
	if n.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		n.h.Close()
		return err
	}
	// If the kernel has too little memory, it may drop a reply. Without a timeout, a request whose reply is lost would never return.
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

// Open opens the namespace of a pod. The caller must have checked that netns is the pod's namespace.
func Open(netns Namespace) (*NS, error) {
	n := &NS{work: make(chan func())}
	ready := make(chan error)
	go n.serveThread(netns, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return n, nil
}

// serveThread moves its thread into the namespace, opens sockets there, and then runs the functions of n.work on that thread. After
// serveThread has entered the namespace, it never unlocks the thread. The thread therefore ends with the goroutine, and no other goroutine
// runs in the wrong namespace. The main thread must not enter the namespace, because it would then keep the namespace alive until the
// process ends. If serveThread runs on the main thread, it starts another goroutine. The other goroutine gets another thread, because the
// main thread is locked.
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

// Close releases the namespace. After a deletion in nf_tables, Close takes some milliseconds: the kernel waits for an RCU grace period
// before it closes the socket.
func (n *Node) Close() {
	n.NFT.Close()
	n.NS.Close()
}

// inNamespace runs f() on a thread inside the namespace. On such a thread, /proc/sys/net contains the settings of the namespace.
func (n *NS) inNamespace(f func() error) error {
	if n.work == nil {
		return f()
	}
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}
