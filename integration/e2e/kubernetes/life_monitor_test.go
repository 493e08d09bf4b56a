// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

// eventMonitor records the netlink events of a node for the agent's routes and nexthops, and for new links.
type eventMonitor struct {
	node    string
	socket  *nl.NetlinkSocket
	stop    chan struct{}
	running sync.WaitGroup

	mu     sync.Mutex
	events []string // "route", "nexthop" or "link NAME"; deletions begin with "-"
	err    error
}

// startMonitor starts to record events in a node. The recording ends when the monitor is stopped.
func (l *clusterLife) startMonitor(t *testing.T, node string) *eventMonitor {
	t.Helper()
	m := &eventMonitor{node: node, stop: make(chan struct{})}
	err := l.places[node].Do(func() (err error) {
		m.socket, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			unix.RTNLGRP_NEXTHOP)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = m.socket.SetReceiveTimeout(&unix.Timeval{Usec: 100_000})
	_ = m.socket.SetReceiveBufferSize(8<<20, true)
	m.running.Go(m.listen)
	return m
}

func (m *eventMonitor) listen() {
	for {
		select {
		case <-m.stop:
			return
		default:
		}
		messages, _, err := m.socket.Receive()
		if err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		m.mu.Lock()
		m.err = err
		for _, message := range messages {
			m.note(message.Header.Type, message.Data)
		}
		m.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (m *eventMonitor) note(kind uint16, body []byte) {
	const protocolOfRoute, protocolOfNexthop = 5, 2
	ours := func(at int) bool { return len(body) > at && body[at] == noderoutes.Protocol }
	switch kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		attributes, err := nl.ParseRouteAttr(body[unix.SizeofIfInfomsg:])
		for _, a := range attributes {
			if err == nil && a.Attr.Type == unix.IFLA_IFNAME {
				m.add(kind == unix.RTM_DELLINK, "link "+strings.TrimRight(string(a.Value), "\x00"))
			}
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if ours(protocolOfRoute) {
			m.add(kind == unix.RTM_DELROUTE, "route")
		}
	case unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		if ours(protocolOfNexthop) {
			m.add(kind == unix.RTM_DELNEXTHOP, "nexthop")
		}
	}
}

func (m *eventMonitor) add(gone bool, event string) {
	if gone {
		event = "-" + event
	}
	m.events = append(m.events, event)
}

// countEvents returns how many of the recorded events are in the given list.
func (m *eventMonitor) countEvents(events ...string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.events {
		for _, want := range events {
			if e == want {
				n++
			}
		}
	}
	return n
}

// endMonitor stops the monitor and returns the number of changes of routes and nexthops.
func (m *eventMonitor) endMonitor(t *testing.T) (changes int) {
	t.Helper()
	close(m.stop)
	m.running.Wait()
	m.socket.Close()
	if m.err != nil {
		t.Errorf("monitor of %s: %v", m.node, m.err)
	}
	return m.countEvents("route", "-route", "nexthop", "-nexthop")
}
