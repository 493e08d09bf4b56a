// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/sandbox"
)

func TestMain(m *testing.M) {
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil && os.Getenv("KERNELTEST") == "require":
		fmt.Fprintln(os.Stderr, "no sandbox:", err)
		os.Exit(1)
	case err != nil:
		fmt.Fprintln(os.Stderr, "SKIP pkg/meter: no sandbox:", err)
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

func within(t *testing.T, what string, got, low, high float64) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s: got %.0f, want %.0f to %.0f", what, got, low, high)
	}
}

func TestUDPArrivesAtTheOfferedRate(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		const offered = 8e6
		got, err := Run(t.Context(), Flow{
			Protocol: UDP, Listen: loopback(is4), Duration: 1500 * time.Millisecond, Rate: offered, Size: 1000,
		})
		if err != nil {
			t.Fatal(err)
		}
		within(t, "first second", got.FirstSecond.Payload, 0.9*offered, 1.1*offered)
		within(t, "steady", got.Steady.Payload, 0.9*offered, 1.1*offered)
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

func TestTCPFillsTheLink(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		start := time.Now()
		got, err := Run(t.Context(), Flow{Protocol: TCP, Listen: loopback(is4), Duration: 300 * time.Millisecond, Streams: 2})
		if err != nil {
			t.Fatal(err)
		}
		within(t, "bit/s over loopback", got.Mean.Payload, 1e8, 1e12)
		if got.Mean.Wire <= got.Mean.Payload {
			t.Errorf("wire %.0f, payload %.0f", got.Mean.Wire, got.Mean.Payload)
		}
		if len(got.Samples) != 3 {
			t.Errorf("%d samples, want 3", len(got.Samples))
		}
		within(t, "seconds", time.Since(start).Seconds(), 0.3, 1.3)
	}
}

func TestFlowBetweenPlaces(t *testing.T) {
	pod, err := sandbox.NewPod("meter")
	if err != nil {
		t.Fatal(err)
	}
	defer pod.Close()
	// The pod's loopback is down: a receiver there is out of reach from here,
	// which it would not be if its socket were made in the wrong namespace.
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
		Duration: time.Second, Patience: 200 * time.Millisecond, Rate: 1e6,
	})
	if !errors.Is(err, ErrSilent) {
		t.Errorf("got %v, want %v", err, ErrSilent)
	}
	within(t, "seconds", time.Since(start).Seconds(), 0.2, 0.9)
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
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := Run(ctx, Flow{Protocol: protocol, Listen: loopback(true), Duration: time.Minute, Rate: 1e6})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: got %v, want %v", protocol, err, context.DeadlineExceeded)
		}
		within(t, "seconds", time.Since(start).Seconds(), 0.2, 1)
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
