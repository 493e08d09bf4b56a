// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/sandbox"
)

func TestPing(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		got, err := Ping(t.Context(), Flow{Listen: loopback(is4), Duration: 500 * time.Millisecond, Patience: soon * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if got.Sent != 50 || got.Lost != 0 || len(got.Samples) != 50 {
			t.Errorf("sent %d, lost %d, %d samples, want 50, 0, 50", got.Sent, got.Lost, len(got.Samples))
		}
		if got.P50 <= 0 || got.P95 < got.P50 || got.P99 < got.P95 {
			t.Errorf("p50 %v, p95 %v, p99 %v", got.P50, got.P95, got.P99)
		}
	}
}

// relay passes datagrams on to a port that it is told later, and back, as handle says. It stands between the two ends of a ping.
func relay(t *testing.T, to netip.AddrPort, handle func(i int, packet []byte, send func([]byte))) netip.AddrPort {
	t.Helper()
	front, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback(true)))
	if err != nil {
		t.Fatal(err)
	}
	back, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll([]*net.UDPConn{front, back}) })
	client := make(chan netip.AddrPort, 1)
	go func() {
		buffer := make([]byte, maxDatagram)
		for i := 0; ; i++ {
			n, from, err := front.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			if i == 0 {
				client <- from
			}
			handle(i, bytes.Clone(buffer[:n]), func(b []byte) { _, _ = back.Write(b) })
		}
	}()
	go func() {
		buffer := make([]byte, maxDatagram)
		at := <-client
		for {
			n, err := back.Read(buffer)
			if err != nil {
				return
			}
			_, _ = front.WriteToUDPAddrPort(buffer[:n], at)
		}
	}()
	return addrPort(front.LocalAddr())
}

// TestPingThroughARelay: what is dropped, and what comes too late, is lost; what comes late took as long; what comes twice, or is of
// another, does not count.
func TestPingThroughARelay(t *testing.T) {
	const late, patience, tooLate = 30 * time.Millisecond, 3 * time.Second, 3100 * time.Millisecond
	listen := netip.MustParseAddrPort("127.0.0.1:4998")
	dial := relay(t, listen, func(i int, packet []byte, send func([]byte)) {
		switch i % 5 {
		case 0:
			time.AfterFunc(late, func() { send(packet) })
		case 1:
		case 2:
			time.AfterFunc(tooLate, func() { send(packet) })
		case 3:
			send(packet)
			send(packet)
		case 4: // the answers to the first, and to one that was never sent
			stray, foreign := bytes.Clone(packet), bytes.Clone(packet)
			stray[0]++
			binary.BigEndian.PutUint32(foreign[headerSize:], 1<<20)
			send(stray)
			send(foreign)
			send(packet[:headerSize-1])
			send(packet[:pingHeader-1])
		}
	})
	got, err := Ping(t.Context(), Flow{Listen: listen, Dial: dial, Duration: 400 * time.Millisecond, Patience: patience})
	if err != nil {
		t.Fatal(err)
	}
	if got.Sent != 40 || got.Lost != 24 || len(got.Samples) != 16 {
		t.Fatalf("sent %d, lost %d, %d samples, want 40, 24, 16", got.Sent, got.Lost, len(got.Samples))
	}
	for i := 0; i < len(got.Samples); i += 2 {
		if got.Samples[i] < late {
			t.Errorf("sample %d: %v, want at least %v", i, got.Samples[i], late)
		}
	}
	if got.P95 != patience {
		t.Errorf("p95 %v, want the patience", got.P95)
	}
}

// TestPingAnsweredTwice: who gets each answer twice does not have all after half of the time.
func TestPingAnsweredTwice(t *testing.T) {
	listen := netip.MustParseAddrPort("127.0.0.1:4997")
	dial := relay(t, listen, func(_ int, packet []byte, send func([]byte)) {
		send(packet)
		send(packet)
	})
	got, err := Ping(t.Context(), Flow{Listen: listen, Dial: dial, Duration: 100 * time.Millisecond, Patience: soon * time.Second})
	if err != nil || got.Lost != 0 || len(got.Samples) != 10 {
		t.Errorf("got %+v, %v, want 10 samples", got, err)
	}
}

// TestPingBetweenPlaces: the pod's loopback is down, and out of reach from here, which it would not be if one of the sockets were made in the
// wrong namespace.
func TestPingBetweenPlaces(t *testing.T) {
	pod, err := sandbox.NewPod("ping")
	if err != nil {
		t.Fatal(err)
	}
	defer pod.Close()
	got, err := Ping(t.Context(), Flow{To: pod.Do, Listen: loopback(true), Duration: 50 * time.Millisecond, Patience: 50 * time.Millisecond})
	if err != nil || got.Lost != 5 {
		t.Errorf("into another namespace: %+v, %v, want 5 lost", got, err)
	}
	// From there, not even the address is known.
	if _, err := Ping(t.Context(), Flow{From: pod.Do, Listen: loopback(true), Duration: 50 * time.Millisecond}); err == nil {
		t.Error("a ping left another namespace")
	}
}

// TestPingBeside: the flow goes on for as long as the ping, and no longer; one that ends before, or never begins, spoils it.
func TestPingBeside(t *testing.T) {
	const after = 50 * time.Millisecond
	ping := Flow{Listen: loopback(true), Duration: 100 * time.Millisecond, Patience: soon * time.Second}
	beside := Flow{Protocol: UDP, Listen: netip.MustParseAddrPort("127.0.0.1:4996"), Rate: 8e6}
	start := time.Now()
	for range 2 { // again: its port is free
		got, err := PingBeside(t.Context(), ping, beside, after)
		if err != nil || got.Sent != 10 || got.Lost != 0 {
			t.Errorf("%+v, %v, want 10 answers", got, err)
		}
	}
	if took := time.Since(start); took < 2*after+2*ping.Duration-2*PingInterval {
		t.Errorf("took %v, did not wait for the flow", took)
	}
	beside.Dial = netip.MustParseAddrPort("127.0.0.1:4995") // where nobody listens
	ping.Duration *= 10
	for patience, late := range map[time.Duration]time.Duration{time.Millisecond: time.Minute, 2 * after: after} {
		beside.Patience = patience
		if _, err := PingBeside(t.Context(), ping, beside, late); !errors.Is(err, ErrSilent) {
			t.Errorf("beside no flow: %v, want %v", err, ErrSilent)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), after)
	defer cancel()
	beside.Dial, beside.Patience = netip.AddrPort{}, 0
	if _, err := PingBeside(ctx, ping, beside, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestPingIsCancelled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := Ping(ctx, Flow{Listen: loopback(true), Duration: time.Minute})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestRoundTrips(t *testing.T) {
	var samples []time.Duration
	for i := 100; i > 0; i-- {
		samples = append(samples, time.Duration(i))
	}
	samples[0], samples[99] = unanswered, unanswered // 100 and 1
	got := roundTrips(samples, time.Second)
	want := RoundTrips{Sent: 100, Lost: 2, P50: 51, P95: 96, P99: time.Second, Samples: got.Samples}
	if diff := cmp.Diff(want, got); diff != "" || len(got.Samples) != 98 || got.Samples[0] != 99 {
		t.Errorf("(-want +got):\n%s%v", diff, got.Samples)
	}
	if got := roundTrips([]time.Duration{7}, 0); got.P50 != 7 || got.P99 != 7 {
		t.Errorf("one sample: %+v", got)
	}
}
