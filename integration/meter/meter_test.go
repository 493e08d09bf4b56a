// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestMain(m *testing.M) {
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil && os.Getenv("KERNELTEST") == "require":
		fmt.Fprintln(os.Stderr, "no sandbox:", err)
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "SKIP integration/meter: no sandbox:", err)
		os.Exit(0)
	case !inside:
		os.Exit(code)
	}
	os.Exit(m.Run())
}

func loopback(is4 bool) netip.AddrPort {
	if is4 {
		return netip.MustParseAddrPort("127.0.0.1:0")
	}
	return netip.MustParseAddrPort("[::1]:0")
}

// maxSeconds is enough for a slow machine but less than a minute, because some flows last a minute and tests must not wait for their end.
const maxSeconds = 30

func within(t *testing.T, what string, got, low, high float64) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s: got %.0f, want %.0f to %.0f", what, got, low, high)
	}
}

// expectRate fails only if the rate is certainly below low or above high, since pauses of the machine make it uncertain.
func (r Result) expectRate(t *testing.T, what string, rate float64, from, to time.Duration, low, high float64) {
	t.Helper()
	if least, most := r.Range(rate, from, to); most < low || least > high {
		t.Errorf("%s: got %.0f (%.0f to %.0f with pauses of %v), want %.0f to %.0f", what, rate, least, most, r.Paused, low, high)
	}
}

// A late first byte and pauses widen the result of Range. From the first byte on, pauses leave the lowest rate as it is.
func TestRange(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		lead, paused, from time.Duration
		low, high          float64
	}{
		{0, 0, 0, 1000, 1000},
		{1000 * ms, 0, 0, 500, math.Inf(1)},
		{50 * ms, 50 * ms, 0, 1000 / 1.05, 1250},
		{50 * ms, 50 * ms, time.Second, 1000 / 1.2, 1250},
		{0, 400 * ms, 0, 1000, math.Inf(1)},
		{0, 400 * ms, time.Second, 1000 / 2.2, math.Inf(1)},
	} {
		low, high := Result{Lead: c.lead, Paused: c.paused}.Range(1000, c.from, c.from+time.Second)
		within(t, "low", low, c.low-.01, c.low+.01)
		if high != c.high && math.Abs(high-c.high) > .01 {
			t.Errorf("%+v: high %.2f", c, high)
		}
	}
}

// TestPauses stops the process with SIGSTOP, which watchPauses must measure.
func TestPauses(t *testing.T) {
	stop := watchPauses()
	start := time.Now()
	cmd := exec.Command("sh", "-c", fmt.Sprintf("kill -STOP %d; sleep 0.3; kill -CONT %[1]d", os.Getpid()))
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	got, took := stop(), time.Since(start)
	within(t, "milliseconds stopped", float64(got.Milliseconds()), 290, float64(took.Milliseconds()))
}

func TestMeasuredUDP(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		const offered = 8e6
		got, err := Run(t.Context(), Flow{
			Protocol: UDP, Listen: loopback(is4), Duration: 1500 * time.Millisecond, Rate: offered, Size: 1000,
		})
		if err != nil {
			t.Fatal(err)
		}
		got.expectRate(t, "first second", got.FirstSecond.Payload, 0, time.Second, 0.9*offered, 1.1*offered)
		got.expectRate(t, "steady", got.Steady.Payload, time.Second, got.Duration, 0.9*offered, 1.1*offered)
		header := 14. + 20 + 8
		if !is4 {
			header += 20
		}
		within(t, "wire", got.Mean.Wire, got.Mean.Payload*(1000+header)/1000-1, got.Mean.Payload*(1000+header)/1000+1)
		if got.Bytes != got.Packets*1000 {
			t.Errorf("%d bytes in %d packets of 1000", got.Bytes, got.Packets)
		}
		if got.Sent < got.Bytes {
			t.Errorf("sent %d, received %d", got.Sent, got.Bytes)
		}
	}
}

func TestMeasuredTCP(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		start := time.Now()
		got, err := Run(t.Context(), Flow{Protocol: TCP, Listen: loopback(is4), Duration: 300 * time.Millisecond, Streams: 2})
		if err != nil {
			t.Fatal(err)
		}
		got.expectRate(t, "bit/s over loopback", got.Mean.Payload, 0, got.Duration, 1e8, 1e12)
		if got.Mean.Wire <= got.Mean.Payload {
			t.Errorf("wire %.0f, payload %.0f", got.Mean.Wire, got.Mean.Payload)
		}
		if len(got.Samples) != 3 {
			t.Errorf("%d samples, want 3", len(got.Samples))
		}
		within(t, "seconds", time.Since(start).Seconds(), 0.3, maxSeconds)
		n := len(got.Arrivals)
		if n == 0 && got.Paused > Interval {
			continue // the machine paused when the kernel's count should be read
		}
		if n == 0 || n > 3 {
			t.Fatalf("%d arrivals in 3 intervals", n)
		}
		// Arrivals can exceed Samples, because bytes arrive before the receiver reads them.
		within(t, "arrived", got.Arrivals[n-1].Wire, 0.95*float64(sum(got.Samples[:n])), 3*float64(got.Bytes))
	}
}

func sum(counts []uint64) (all uint64) {
	for _, c := range counts {
		all += c
	}
	return all
}

// segmentsOf counts segments that the receiver has not yet read.
func TestSegmentsCountUnread(t *testing.T) {
	flow := Flow{From: Here, To: Here, Listen: loopback(true), Patience: time.Second, Streams: 2}
	listener, err := listenTCP(t.Context(), flow)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	senders, err := dialTCP(t.Context(), flow, addrPort(listener.Addr()))
	defer closeAll(senders)
	if err != nil {
		t.Fatal(err)
	}
	receivers, err := acceptTCP(listener, 2, time.Second)
	defer closeAll(receivers)
	if err != nil {
		t.Fatal(err)
	}
	for _, sender := range senders {
		for range 5 {
			if _, err := sender.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := segmentsOf(receivers); got != 10 {
		t.Errorf("%d segments, want 10", got)
	}
	if got := segmentsOf(senders); got != 0 {
		t.Errorf("%d segments came back, want none", got)
	}
}

func TestCongestionControl(t *testing.T) {
	flow := Flow{Protocol: TCP, Listen: loopback(true), Duration: 50 * time.Millisecond, Control: "none such"}
	if _, err := Run(t.Context(), flow); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("got %v, want %v", err, syscall.ENOENT)
	}
	flow.Control = "reno"
	if _, err := Run(t.Context(), flow); err != nil {
		t.Error(err)
	}
}

func TestFlowBetweenPlaces(t *testing.T) {
	pod, err := sandbox.NewPod("meter")
	if err != nil {
		t.Fatal(err)
	}
	defer pod.Close()
	// lo of the pod is down, so the sender can reach a receiver only if its socket is in the wrong namespace.
	_, err = Run(t.Context(), Flow{
		Protocol: UDP, To: pod.Do, Listen: loopback(true),
		Duration: time.Second, Patience: 300 * time.Millisecond, Rate: 1e6,
	})
	if !errors.Is(err, ErrSilent) {
		t.Errorf("got %v, want %v", err, ErrSilent)
	}
	_, err = Run(t.Context(), Flow{Protocol: TCP, To: pod.Do, Listen: loopback(true), Duration: time.Second})
	if err == nil {
		t.Error("a connection reached another namespace")
	}
}

func TestSilence(t *testing.T) {
	start := time.Now()
	_, err := Run(t.Context(), Flow{
		Protocol: UDP, Listen: loopback(true), Dial: netip.MustParseAddrPort("127.0.0.1:9"),
		Duration: time.Minute, Patience: 200 * time.Millisecond, Rate: 1e6,
	})
	if !errors.Is(err, ErrSilent) {
		t.Errorf("got %v, want %v", err, ErrSilent)
	}
	within(t, "seconds", time.Since(start).Seconds(), 0.2, maxSeconds)
}

// A relay accepts the connection but forwards no data.
func TestSilentConnection(t *testing.T) {
	listen := netip.MustParseAddrPort("127.0.0.1:4996")
	relay, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(loopback(true)))
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	passing := make(chan net.Conn, 1)
	go func() {
		if conn, err := relay.Accept(); err == nil {
			defer conn.Close()
			onward, _ := net.Dial("tcp4", listen.String())
			passing <- onward
			<-t.Context().Done()
		}
	}()
	_, err = Run(t.Context(), Flow{
		Protocol: TCP, Listen: listen, Dial: addrPort(relay.Addr()), Duration: time.Second, Patience: 300 * time.Millisecond,
	})
	if !errors.Is(err, ErrSilent) {
		t.Errorf("got %v, want %v", err, ErrSilent)
	}
	if conn := <-passing; conn != nil {
		conn.Close()
	}
}

func TestStrayDatagramsDoNotCount(t *testing.T) {
	listen := netip.MustParseAddrPort("127.0.0.1:4999")
	stray, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(listen))
	if err != nil {
		t.Fatal(err)
	}
	defer stray.Close()
	ctx, stop := context.WithCancel(t.Context())
	var sending sync.WaitGroup
	sending.Go(func() {
		for ctx.Err() == nil {
			_, _ = stray.Write(make([]byte, 1400))
			time.Sleep(time.Millisecond)
		}
	})
	_, err = Run(ctx, Flow{
		Protocol: UDP, Listen: listen, Dial: netip.MustParseAddrPort("127.0.0.1:9"),
		Duration: time.Second, Patience: 200 * time.Millisecond, Rate: 1e6,
	})
	stop()
	sending.Wait()
	if !errors.Is(err, ErrSilent) {
		t.Errorf("got %v, want %v", err, ErrSilent)
	}
}

func TestCancel(t *testing.T) {
	for _, protocol := range []Protocol{TCP, UDP} {
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := Run(ctx, Flow{Protocol: protocol, Listen: loopback(true), Duration: time.Minute, Rate: 1e6})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v, want %v", protocol, err, context.DeadlineExceeded)
		}
		within(t, "seconds", time.Since(start).Seconds(), 0.2, maxSeconds)
	}
}

func TestRefusedFlows(t *testing.T) {
	for name, flow := range map[string]Flow{
		"protocol": {Protocol: "sctp", Listen: loopback(true), Duration: time.Second},
		"address":  {Protocol: TCP, Duration: time.Second},
		"duration": {Protocol: TCP, Listen: loopback(true)},
		"size":     {Protocol: UDP, Listen: loopback(true), Duration: time.Second, Size: 4},
	} {
		if _, err := Run(t.Context(), flow); err == nil {
			t.Errorf("%s: a flow that cannot work ran", name)
		}
	}
}
