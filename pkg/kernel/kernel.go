// SPDX-License-Identifier: Apache-2.0

// Package kernel reads and changes Linux networking: links, addresses, routes, qdiscs, connection tracking and sysctls. Package nft does so
// for nf_tables. Verbs follow ip(8): Ensure means idempotent, nouns read, other verbs change. Every change passes fault.Change.
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

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/nft"
)

// requestTimeout bounds one answer of the kernel. Most take microseconds; deleting a link may take seconds on a busy node.
const requestTimeout = 30 * time.Second

// NS is a network namespace that can be read and changed: the plugin's own (Host) or a pod's (Open).
type NS struct {
	h *netlink.Handle
	// sockets are for requests that the handle does not support.
	sockets map[int]*nl.SocketHandle
	strict  map[int]*nl.SocketHandle // for dump, opened on first use
	work    chan func()              // runs functions on a thread inside the namespace; nil for the own namespace

	sysctls map[string]*os.File // folders below /proc/sys/net, opened on first use
}

// Node is the process's own namespace, with the operations that only exist there.
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
	// The handle needs exactly NETLINK_ROUTE. Without a family it silently works in the caller's namespace; with all families it needs
	// XFRM.
	if n.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		n.h.Close()
		return err
	}
	// The kernel may drop an answer when memory is short, so a request without a timeout might never return.
	limit := unix.NsecToTimeval(requestTimeout.Nanoseconds())
	_ = errors.Join(n.h.SetSocketTimeout(requestTimeout), s.SetSendTimeout(&limit), s.SetReceiveTimeout(&limit))
	n.sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
	return nil
}

// request returns a new netlink request with acknowledgement.
func (n *NS) request(kind, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.Sockets = n.sockets
	return req
}

// Namespace is an open network namespace, such as an ns.NetNS of containernetworking/plugins, or its file.
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

// Open opens the namespace of a pod. The caller has validated it.
func Open(netns Namespace) (*NS, error) {
	n := &NS{work: make(chan func())}
	ready := make(chan error)
	go n.serve(netns, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return n, nil
}

// serve runs on a separate thread inside the namespace, so that its sockets and sysctls belong to the namespace. The thread is never
// unlocked: it ends with the goroutine, so no other goroutine runs in the wrong namespace. The main thread cannot end and would keep the
// namespace alive for the life of the process. serve therefore blocks the main thread until a serve on another thread has started.
func (n *NS) serve(netns Namespace, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		began := make(chan error)
		go n.serve(netns, began)
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
	for _, sockets := range []map[int]*nl.SocketHandle{n.sockets, n.strict} {
		for _, s := range sockets {
			s.Close()
		}
	}
	for _, folder := range n.sysctls {
		folder.Close()
	}
	if n.work != nil {
		close(n.work)
	}
}

// Close releases the namespace. It may wait some milliseconds: after a delete, nf_tables frees memory after an RCU grace period, and
// closing the socket waits for that.
func (n *Node) Close() {
	n.NFT.Close()
	n.NS.Close()
}

// within runs f on a thread that sees the namespace's /proc/sys/net.
func (n *NS) within(f func() error) error {
	if n.work == nil {
		return f()
	}
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}

// retry repeats an interrupted request, such as a dump during which the table changed.
func retry(f func() error) error { return fault.Retry(f, netlink.ErrDumpInterrupted) }
