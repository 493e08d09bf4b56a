// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"encoding/binary"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

type eventLog struct {
	mu     sync.Mutex
	events []Event
}

func (h *eventLog) take(events <-chan Event) {
	for e := range events {
		h.mu.Lock()
		h.events = append(h.events, e)
		h.mu.Unlock()
	}
}

func (h *eventLog) awaitEvent(t *testing.T, what string, is func(Event) bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		h.mu.Lock()
		found := slices.ContainsFunc(h.events, is)
		h.mu.Unlock()
		if found {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no event of %s in %+v", what, h.events)
		}
	}
}

// TestEvents: adding, renaming, changing and removing a link each send an event with its kind. The channel is closed when the context ends.
func TestEvents(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	_, netns := podNS(t)
	ctx, stop := context.WithCancel(t.Context())
	var got eventLog
	events, err := Events(ctx)
	kerneltest.Must(t, err)
	ended := make(chan struct{})
	go func() { got.take(events); close(ended) }()
	index, err := h.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: netns})
	kerneltest.Must(t, err)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth1")) })
	got.awaitEvent(t, "a veth", func(e Event) bool { return e.Link == "kth0" && e.Kind == "veth" })
	veth, err := h.h.LinkByIndex(index)
	kerneltest.Must(t, err, h.h.LinkSetName(veth, "kth1"))
	got.awaitEvent(t, "its other name", func(e Event) bool { return e.Link == "kth1" && e.Kind == "veth" })
	lo, err := h.h.LinkByName("lo")
	kerneltest.Must(t, err, h.h.LinkSetMTU(lo, 65535), h.h.LinkSetMTU(lo, 65536))
	got.awaitEvent(t, "lo", func(e Event) bool { return e == Event{Link: "lo"} })
	stop()
	<-ended
}

// TestEventsUntaken: a late receiver gets the events in order. When the context ends, the channel is closed even if some are unread.
func TestEventsUntaken(t *testing.T) {
	h := host(t)
	ctx, stop := context.WithCancel(t.Context())
	events, err := Events(ctx)
	kerneltest.Must(t, err)
	addBridge(t, h, "kt0")
	lo, err := h.h.LinkByName("lo")
	kerneltest.Must(t, err)
	for i := range 50 {
		kerneltest.Must(t, h.h.LinkSetMTU(lo, 65535+i%2))
	}
	if first := <-events; first.Link != "kt0" && first.Device == "" {
		t.Errorf("at first %+v", first)
	}
	stop()
	for range events { // until it is closed
	}
}

// TestEventsOverflow: an overflow of the socket sends an event with Lost, and later events still arrive.
func TestEventsOverflow(t *testing.T) {
	h := host(t)
	socket, err := subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	kerneltest.Must(t, err)
	defer socket.Close()
	raw, err := socket.SyscallConn()
	kerneltest.Must(t, err)
	kerneltest.Must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }), err)
	lo, err := h.h.LinkByName("lo")
	kerneltest.Must(t, err)
	for i := range 50 {
		kerneltest.Must(t, h.h.LinkSetMTU(lo, 65535+i%2))
	}
	var got eventLog
	ended := make(chan bool)
	events := make(chan Event)
	go got.take(events)
	go func() {
		listen(socket, linkEvents, Event{Lost: true}, func(list []Event) {
			for _, e := range list {
				events <- e
			}
		})
		close(events)
		close(ended)
	}()
	got.awaitEvent(t, "the overflow", func(e Event) bool { return e.Lost })
	got.mu.Lock()
	got.events = nil
	got.mu.Unlock()
	kerneltest.Must(t, h.h.LinkSetMTU(lo, 65535), h.h.LinkSetMTU(lo, 65536))
	got.awaitEvent(t, "lo after the overflow", func(e Event) bool { return e.Link == "lo" })
	socket.Close()
	<-ended
}

// TestEventsEnd: with an unreadable socket, listen delivers an event with Lost and returns.
func TestEventsEnd(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	kerneltest.Must(t, err)
	defer dir.Close()
	var got []Event
	listen(dir, linkEvents, Event{Lost: true}, func(list []Event) { got = append(got, list...) })
	if !slices.Equal(got, []Event{{Lost: true}}) {
		t.Errorf("%+v", got)
	}
}

func TestLinkEvents(t *testing.T) {
	message := func(kind uint16, family byte, attributes ...byte) []byte {
		body := append(append([]byte{family}, make([]byte, unix.SizeofIfInfomsg-1)...), attributes...)
		head := binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body))), kind)
		return append(append(head, make([]byte, unix.SizeofNlMsghdr-len(head))...), body...)
	}
	name := "\x08\x00\x03\x00pf0\x00"
	one := message(unix.RTM_NEWLINK, unix.AF_UNSPEC, []byte(name)...)
	for what, c := range map[string]struct {
		datagram []byte
		want     []Event
	}{
		"nothing":       {},
		"one":           {one, []Event{{Link: "pf0"}}},
		"two":           {append(slices.Clone(one), message(unix.RTM_DELLINK, unix.AF_UNSPEC)...), []Event{{Link: "pf0"}, {}}},
		"another kind":  {message(unix.RTM_NEWADDR, unix.AF_INET), nil},
		"a bridge port": {message(unix.RTM_NEWLINK, unix.AF_BRIDGE, []byte(name)...), nil},
		"truncated":     {one[:len(one)-1], []Event{{Lost: true}}},
		"too short":     {message(unix.RTM_NEWLINK, 0)[:unix.SizeofNlMsghdr+1], []Event{{Lost: true}}},
		"a short body": {append(binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint32(nil, 20), unix.RTM_NEWLINK),
			make([]byte, 14)...), []Event{{Lost: true}}},
	} {
		if diff := cmp.Diff(c.want, linkEvents(c.datagram)); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
	}
}

func TestDeviceEvents(t *testing.T) {
	for datagram, want := range map[string][]Event{
		"bind@/devices/pci0000:3a/0000:3a:00.0/0000:3b:10.2\x00ACTION=bind\x00": {{Device: "/devices/pci0000:3a/0000:3a:00.0/0000:3b:10.2"}},
		"add@/devices/virtual/net/veth0":                                        {{Device: "/devices/virtual/net/veth0"}},
		"libudev\x00\xfe\xed\xca\xfe":                                           nil,
		"":                                                                      nil,
	} {
		if diff := cmp.Diff(want, deviceEvents([]byte(datagram))); diff != "" {
			t.Errorf("%q: %s", datagram, diff)
		}
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("\x10\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("add@/devices/virtual/net/veth0\x00ACTION=add\x00"))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		for _, e := range append(linkEvents(datagram), deviceEvents(datagram)...) {
			if e.Lost && e != (Event{Lost: true}) || strings.Contains(e.Device, "\x00") {
				t.Fatalf("%+v", e)
			}
		}
	})
}
