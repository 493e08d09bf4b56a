// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Event says that a network interface (link) or a hardware device was added, removed or changed.
type Event struct {
	Lost bool // the socket overflowed and some events were lost: anything may have changed

	// set in an event about a link
	Link string // its name
	Kind string // as in Link; hardware has none

	Device string // for a device: its folder below /sys, such as /devices/pci0000:3a/...
}

// kernelUevents is the multicast group of the kernel's uevents. Those of udev are in group 2.
const kernelUevents = 1

// Sizes in bytes, and the most datagrams of a round. Every datagram of the kernel is smaller than largestEvent. A socket's buffer takes
// about eight thousand messages, as many as a routing daemon causes in 100 ms.
const (
	largestEvent = 64 << 10
	eventRound   = 10_000 // datagrams
	eventBuffer  = 4 << 20
)

// Events returns a channel of events about the node's devices, some of which may be missing in a user namespace, and about links in the
// caller's namespace. A receiver that is too slow gets an event with Lost. The channel and the sockets are closed when ctx ends.
func Events(ctx context.Context) (<-chan Event, error) {
	links, err := subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	if err != nil {
		return nil, fmt.Errorf("listen to links: %w", err)
	}
	devices, err := subscribe(unix.NETLINK_KOBJECT_UEVENT, kernelUevents)
	if err != nil {
		slog.Debug("no uevents", "error", err)
	}
	events := make(chan Event)
	send := func(list []Event) {
		for _, e := range list {
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
	}
	var running sync.WaitGroup
	running.Go(func() { listen(links, linkEvents, Event{Lost: true}, send) })
	if devices != nil {
		running.Go(func() { listen(devices, deviceEvents, Event{Lost: true}, send) })
	}
	context.AfterFunc(ctx, func() {
		links.Close()
		devices.Close() // on nil this returns an error
		running.Wait()
		close(events)
	})
	return events, nil
}

// subscribe opens a socket for the messages of multicast groups, which one goroutine can close while another one reads. A subscription of
// package netlink would end when its socket overflows.
func subscribe(protocol int, groups ...uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, err
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer) != nil { // an ordinary user gets at most rmem_max
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: mask}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// listen waits for datagrams and calls deliver with the events of all that have arrived, until the socket is closed. After an overflow, or
// if the socket is unreadable, the events contain lost.
func listen[E any](socket *os.File, parse func([]byte) []E, lost E, deliver func([]E)) {
	conn, err := socket.SyscallConn()
	buffer := make([]byte, largestEvent)
	for err == nil {
		var events []E
		var failed error
		err = conn.Read(func(fd uintptr) bool {
			for count := 0; ; count++ {
				if count == eventRound {
					return true // deliver during a flood too
				}
				switch n, err := unix.Read(int(fd), buffer); {
				case err == nil:
					events = append(events, parse(buffer[:n])...)
				case errors.Is(err, unix.EAGAIN):
					return count > 0
				case errors.Is(err, unix.ENOBUFS):
					events = append(events, lost)
				case !errors.Is(err, unix.EINTR):
					events, failed = append(events, lost), err
					return true
				}
			}
		})
		deliver(events)
		if failed != nil {
			slog.Warn("no more events from the kernel: changes by other programs are noticed late; restart this program", "error", failed)
			return
		}
	}
}

// linkEvents returns the events in a datagram of rtnetlink(7) messages.
func linkEvents(datagram []byte) []Event { return eachMessage(datagram, Event{Lost: true}, linkEvent) }

// eachMessage returns the results of parse for the messages in a datagram, or lost if it is malformed.
func eachMessage[E any](datagram []byte, lost E, parse func(syscall.NetlinkMessage) (E, bool)) (events []E) {
	messages, err := syscall.ParseNetlinkMessage(datagram)
	if err != nil {
		return []E{lost}
	}
	for _, m := range messages {
		if e, ok := parse(m); ok {
			events = append(events, e)
		}
	}
	return events
}

// linkEvent returns the event in a message about a link. It ignores messages of family AF_BRIDGE about bridge ports, which lack the link's
// kind.
func linkEvent(m syscall.NetlinkMessage) (e Event, ok bool) {
	if m.Header.Type != unix.RTM_NEWLINK && m.Header.Type != unix.RTM_DELLINK {
		return e, false
	}
	if len(m.Data) < unix.SizeofIfInfomsg {
		return Event{Lost: true}, true
	}
	attributes := m.Data[unix.SizeofIfInfomsg:]
	return Event{Link: textAt(attributes, unix.IFLA_IFNAME), Kind: textAt(attributes, unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND)},
		m.Data[0] != unix.AF_BRIDGE
}

// deviceEvents returns the event in a uevent message of the kernel: strings that end with a zero byte, of which the first one is
// action@folder and the others are variable=value.
func deviceEvents(datagram []byte) []Event {
	head, _, _ := bytes.Cut(datagram, []byte{0})
	_, device, ok := strings.Cut(string(head), "@")
	if !ok {
		return nil
	}
	return []Event{{Device: device}}
}
