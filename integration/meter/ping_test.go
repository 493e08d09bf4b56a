// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestPing(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		got, err := Ping(t.Context(), Flow{Listen: loopback(is4), Duration: 500 * time.Millisecond, Patience: maxSeconds * time.Second})
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

// answerPings answers echo requests in place of the kernel until the test ends. handle gets each request, and reply to send an answer.
func answerPings(t *testing.T, handle func(i int, request []byte, reply func([]byte))) {
	t.Helper()
	const ignore = "/proc/sys/net/ipv4/icmp_echo_ignore_all"
	set := func(value string) {
		if err := os.WriteFile(ignore, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	set("1")
	t.Cleanup(func() { set("0") })
	conn, err := net.ListenIP("ip4:icmp", &net.IPAddr{IP: loopback(true).Addr().AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		buffer := make([]byte, maxDatagram)
		for i := 0; ; {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			if buffer[0] == echo4 { // the socket receives its own replies too
				handle(i, bytes.Clone(buffer[:n]), func(b []byte) {
					b = bytes.Clone(b)
					b[0] = reply4
					_, _ = conn.WriteTo(b, from)
				})
				i++
			}
		}
	}()
}

// A missing or too late reply counts as lost. The delay of a slow one is part of the round-trip time. Duplicates and replies to other pings
// do not count.
func TestPingAnswers(t *testing.T) {
	const late, patience, tooLate = 30 * time.Millisecond, 3 * time.Second, 3100 * time.Millisecond
	answerPings(t, func(i int, request []byte, reply func([]byte)) {
		switch i % 5 {
		case 0:
			time.AfterFunc(late, func() { reply(request) })
		case 1:
		case 2:
			time.AfterFunc(tooLate, func() { reply(request) })
		case 3:
			reply(request)
			reply(request)
		case 4: // replies to another ping, and to a request that was never sent
			stray, foreign := bytes.Clone(request), bytes.Clone(request)
			stray[icmpHeader]++
			binary.BigEndian.PutUint32(foreign[icmpHeader+headerSize:], 1<<20)
			reply(stray)
			reply(foreign)
			reply(request[:icmpHeader])
			reply(request[:pingHeader-1])
		}
	})
	got, err := Ping(t.Context(), Flow{Listen: loopback(true), Duration: 400 * time.Millisecond, Patience: patience})
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

// Ping waits for all replies if each arrives twice.
func TestPingAnsweredTwice(t *testing.T) {
	answerPings(t, func(_ int, request []byte, reply func([]byte)) {
		reply(request)
		reply(request)
	})
	got, err := Ping(t.Context(), Flow{Listen: loopback(true), Duration: 100 * time.Millisecond, Patience: maxSeconds * time.Second})
	if err != nil || got.Lost != 0 || len(got.Samples) != 10 {
		t.Errorf("got %+v, %v, want 10 samples", got, err)
	}
}

func TestPingUnanswered(t *testing.T) {
	answerPings(t, func(int, []byte, func([]byte)) {})
	got, err := Ping(t.Context(), Flow{Listen: loopback(true), Duration: 50 * time.Millisecond, Patience: 50 * time.Millisecond})
	if err != nil || got.Lost != 5 {
		t.Errorf("%+v, %v, want 5 lost", got, err)
	}
}

// isReply is false for a message with another type, another length or another ping's mark.
func TestEchoRequest(t *testing.T) {
	p, other := pings{is4: true, mark: 7}, pings{is4: true, mark: 8}
	request := p.echoRequest(3)
	if checksum(request) != 0 {
		t.Error("the checksum of a whole message is not zero")
	}
	as := func(kind byte, message []byte) []byte { return append([]byte{kind}, message[1:]...) }
	if !p.isReply(as(reply4, request)) {
		t.Error("a reply is not known as one")
	}
	for name, message := range map[string][]byte{
		"the request":    request,
		"short":          as(reply4, request[:7]),
		"another mark":   as(reply4, other.echoRequest(3)),
		"another family": as(reply6, request),
	} {
		if p.isReply(message) {
			t.Errorf("%s passes for a reply", name)
		}
	}
}

// lo of the pod is down, so a ping from it to 127.0.0.1 succeeds only if the socket is in the wrong namespace.
func TestPingFromAPlace(t *testing.T) {
	pod, err := sandbox.NewPod("ping")
	if err != nil {
		t.Fatal(err)
	}
	defer pod.Close()
	if _, err := Ping(t.Context(), Flow{From: pod.Do, Listen: loopback(true), Duration: 50 * time.Millisecond}); err == nil {
		t.Error("a ping left another namespace")
	}
}

// The flow runs until the end of the ping. If it ends early or never starts, PingBeside returns an error.
func TestPingBeside(t *testing.T) {
	const after = 50 * time.Millisecond
	ping := Flow{Listen: loopback(true), Duration: 100 * time.Millisecond, Patience: maxSeconds * time.Second}
	beside := Flow{Protocol: UDP, Listen: netip.MustParseAddrPort("127.0.0.1:4996"), Rate: 8e6}
	start := time.Now()
	for range 2 { // the second time the port must be free again
		got, err := PingBeside(t.Context(), ping, beside, after)
		if err != nil || got.Sent != 10 || got.Lost != 0 {
			t.Errorf("%+v, %v, want 10 answers", got, err)
		}
	}
	if took := time.Since(start); took < 2*after+2*ping.Duration-2*PingInterval {
		t.Errorf("took %v, did not wait for the flow", took)
	}
	beside.Dial = netip.MustParseAddrPort("127.0.0.1:4995") // no process listens there
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
	samples[0], samples[99] = unanswered, unanswered // requests 100 and 1
	got := roundTrips(samples, time.Second)
	want := RoundTrips{Sent: 100, Lost: 2, P50: 51, P95: 96, P99: time.Second, Samples: got.Samples}
	if diff := cmp.Diff(want, got); diff != "" || len(got.Samples) != 98 || got.Samples[0] != 99 {
		t.Errorf("(-want +got):\n%s%v", diff, got.Samples)
	}
	if got := roundTrips([]time.Duration{7}, 0); got.P50 != 7 || got.P99 != 7 {
		t.Errorf("one sample: %+v", got)
	}
}
