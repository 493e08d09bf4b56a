// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Event reports that a network interface (link) or a hardware device was added, removed or changed.
type Event struct {
	Lost bool // the socket overflowed and some events were lost: anything may have changed

	// The fields Link and Kind are set in an event about a link.
	Link string // its name
	Kind string // as in Link; hardware has none

	Device string // for a device: its folder below /sys, such as /devices/pci0000:3a/...
}

// kernelUevents is the multicast group on which the kernel sends uevents. The program udev sends its own events on group 2.
const kernelUevents = 1

// largestEvent is the size of the receive buffer in bytes. Every datagram of the kernel is smaller than largestEvent.
const largestEvent = 64 << 10

// Events returns a channel of events about the devices of the node, and about links in the caller's namespace. In a user namespace, some
// device events may be missing. If the receiver is too slow, it gets an event whose field Lost is true. Events closes the channel and the
// sockets when ctx ends.
func Events(ctx context.Context) (<-chan Event, error) {
	links, err := subscribe(unix.NETLINK_ROUTE, nil, unix.RTNLGRP_LINK)
	if err != nil {
		return nil, fmt.Errorf("listen to links: %w", err)
	}
	devices, err := subscribe(unix.NETLINK_KOBJECT_UEVENT, nil, kernelUevents)
	if err != nil {
		slog.Debug("no uevents", "error", err)
	}
	events := make(chan Event)
	var running sync.WaitGroup
	running.Go(func() { sendEvents(ctx, links, linkEvents, Event{Lost: true}, events) })
	if devices != nil {
		running.Go(func() { sendEvents(ctx, devices, deviceEvents, Event{Lost: true}, events) })
	}
	context.AfterFunc(ctx, func() {
		links.Close()
		devices.Close() // on nil this returns an error
		running.Wait()
		close(events)
	})
	return events, nil
}

// subscribe() opens a socket that receives the messages of multicast groups. The socket drops the messages that do not match the filter.
// With a nil filter, the socket drops no messages. One goroutine can close the socket while another goroutine reads from it.
func subscribe(protocol int, filter []unix.SockFilter, groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, err
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	if filter != nil {
		program := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, program)
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: mask})
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// sendEvents sends the events of each datagram until the socket is closed or ctx ends. If the buffer of the socket overflows, sendEvents
// sends the event in the argument "lost".
func sendEvents[E any](ctx context.Context, socket *os.File, parse func([]byte) []E, lost E, to chan<- E) {
	buffer := make([]byte, largestEvent)
	for {
		events, err := receive(socket, buffer, parse, lost)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		for _, e := range events {
			select {
			case to <- e:
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			slog.Warn("no more events from the kernel", "error", err)
			return
		}
	}
}

// receive() waits for a datagram and returns its events. If the buffer of the socket has overflowed, or if the socket is unreadable,
// receive() returns the event in the argument "lost".
func receive[E any](socket *os.File, buffer []byte, parse func([]byte) []E, lost E) ([]E, error) {
	n, err := socket.Read(buffer)
	switch {
	case err == nil:
		return parse(buffer[:n]), nil
	case errors.Is(err, unix.ENOBUFS):
		return []E{lost}, nil
	case errors.Is(err, unix.EINTR), errors.Is(err, io.EOF): // an empty datagram
		return nil, nil
	}
	return []E{lost}, err
}

// linkEvents returns the events in a datagram of rtnetlink(7) messages.
func linkEvents(datagram []byte) []Event {
	return eachMessage(datagram, Event{Lost: true}, func(kind, _ uint16, body []byte) []Event {
		if kind == unix.RTM_NEWLINK || kind == unix.RTM_DELLINK {
			return linkEvent(body)
		}
		return nil
	})
}

// eachMessage calls parse with the type, flags and body of each message in a datagram, and returns all results. At the first malformed
// message, eachMessage stops, and adds the event in the argument "lost" to the results.
func eachMessage[E any](datagram []byte, lost E, parse func(kind, flags uint16, body []byte) []E) (events []E) {
	for len(datagram) >= unix.SizeofNlMsghdr {
		length := int(binary.NativeEndian.Uint32(datagram))
		if length < unix.SizeofNlMsghdr || length > len(datagram) {
			return append(events, lost)
		}
		kind, flags := binary.NativeEndian.Uint16(datagram[4:]), binary.NativeEndian.Uint16(datagram[6:])
		events = append(events, parse(kind, flags, datagram[unix.SizeofNlMsghdr:length])...)
		datagram = datagram[min((length+3)&^3, len(datagram)):]
	}
	return events
}

// linkEvent returns the event in the body of a netlink message about a link. linkEvent ignores messages of family AF_BRIDGE about bridge
// ports, because they do not contain the kind of the link.
func linkEvent(message []byte) []Event {
	if len(message) < unix.SizeofIfInfomsg {
		return []Event{{Lost: true}}
	}
	if message[0] == unix.AF_BRIDGE {
		return nil
	}
	attributes := message[unix.SizeofIfInfomsg:]
	text := func(path ...uint16) string {
		return strings.TrimRight(string(attributeAt(attributes, path...)), "\x00")
	}
	return []Event{{Link: text(unix.IFLA_IFNAME), Kind: text(unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND)}}
}

// deviceEvents returns the event in a uevent message of the kernel. A uevent is a list of strings, and each string ends with a zero byte.
// The first string has the format action@folder. Each other string has the format variable=value.
func deviceEvents(datagram []byte) []Event {
	head, _, _ := bytes.Cut(datagram, []byte{0})
	_, device, ok := strings.Cut(string(head), "@")
	if !ok {
		return nil
	}
	return []Event{{Device: device}}
}
