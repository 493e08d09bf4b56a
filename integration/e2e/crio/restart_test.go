// SPDX-License-Identifier: Apache-2.0

package crio_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
	"github.com/podlace/podlace/integration/meter"
)

const (
	stayDown  = "/run/node/stay-down"
	startTime = 30 * time.Second
)

// restartCRIO ends CRI-O with a signal, calls whileDown unless it is nil, and starts CRI-O again.
func restartCRIO(t *testing.T, c cri.Client, signal syscall.Signal, whileDown func()) {
	t.Helper()
	pid := func() (n int) {
		data, _ := os.ReadFile("/run/node/crio.pid")
		_, _ = fmt.Sscan(string(data), &n)
		return n
	}
	former := pid()
	if err := os.WriteFile(stayDown, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(stayDown)
	if err := syscall.Kill(former, signal); err != nil || former == 0 {
		t.Fatalf("CRI-O has PID %d: %v", former, err)
	}
	checkWithin(t, startTime, "CRI-O ends", func() error {
		if syscall.Kill(former, 0) == nil {
			return fmt.Errorf("PID %d runs", former)
		}
		return nil
	})
	if whileDown != nil {
		whileDown()
	}
	if err := os.Remove(stayDown); err != nil {
		t.Fatal(err)
	}
	checkWithin(t, startTime, "CRI-O is ready again", func() error {
		if pid() == former {
			return errors.New("it has not started")
		}
		return c.Ready(t.Context())
	})
}

// checkWithin repeats a check until it succeeds. The time limit fails the test.
func checkWithin(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	if err := cri.Eventually(t.Context(), limit, check); err != nil {
		t.Fatalf("not within %s: %s: %v", limit, what, err)
	}
}

// TestRestart: pods lose no packet while CRI-O restarts, and keep their addresses in the status, which requires that its CHECK succeeds.
func TestRestart(t *testing.T) {
	c := cri.Open(t, socket)
	const port = 18090
	web, shop := cri.RunPod(t, c, "web", cri.HostPort(port), cri.Limits("100M", "100M")), cri.RunPod(t, c, "shop")
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			results := make(chan error)
			flows := []meter.Flow{{Listen: web.At(web.V4)}, {Listen: web.At(web.V6)}, {Listen: shop.At(shop.V4)}, {Listen: shop.At(shop.V6)}}
			for _, f := range flows {
				go func() { results <- pingWithoutLoss(ctx, t, f) }()
			}
			restartCRIO(t, c, signal, nil)
			stop()
			for range flows {
				if err := <-results; err != nil {
					t.Error(err)
				}
			}
			for _, p := range []*cri.Pod{web, shop} {
				if got, err := c.Network(t.Context(), p.Sandbox); err != nil || got != p.Network {
					t.Errorf("pod %s has %+v, %v: want %+v", p.Name, got, err, p.Network)
				}
			}
			web.Serves(cri.OutsideNetns, web.OnNode4(port))
			web.Serves(shop.Netns, web.At(web.V6))
		})
	}
}

// pingWithoutLoss sends pings from the node until the context ends, and returns an error if a reply is missing.
func pingWithoutLoss(ctx context.Context, t *testing.T, flow meter.Flow) error {
	flow.From, flow.Duration, flow.Patience = meter.Here, time.Second/2, 10*time.Second
	sent, lost := 0, 0
	for ctx.Err() == nil {
		r, err := meter.Ping(t.Context(), flow)
		if err != nil {
			return err
		}
		sent, lost = sent+r.Sent, lost+r.Lost
	}
	t.Logf("%s: %d packets, %d lost", flow.Listen.Addr(), sent, lost)
	if lost > 0 || sent < 50 {
		return fmt.Errorf("%s: %d of %d packets are lost: want none of 50 or more", flow.Listen.Addr(), lost, sent)
	}
	return nil
}

// TestCheckAtStart: CRI-O calls CHECK for each running pod at its start. A pod that has lost its addresses fails it and shows none in its
// status, while every other pod still does.
func TestCheckAtStart(t *testing.T) {
	c := cri.Open(t, socket)
	broken, whole := cri.RunPod(t, c, "broken"), cri.RunPod(t, c, "whole")
	if out, err := exec.Command("ip", "-n", filepath.Base(broken.Netns), "address", "flush", "dev", "eth0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	restartCRIO(t, c, syscall.SIGKILL, nil)
	if got, err := c.Network(t.Context(), broken.Sandbox); err != nil || got.V4.IsValid() || got.V6.IsValid() {
		t.Errorf("pod broken has %+v, %v: want no address", got, err)
	}
	if got, err := c.Network(t.Context(), whole.Sandbox); err != nil || got != whole.Network {
		t.Errorf("pod whole has %+v, %v: want %+v", got, err, whole.Network)
	}
}

// TestFlush: a flush removes Podlace's masquerade rules and CRI-O's hostPort rules. CRI-O's STATUS every five seconds restores the former.
// It does not restore hostPorts of existing pods, even at a restart; those of later pods work.
func TestFlush(t *testing.T) {
	c := cri.Open(t, socket)
	const port = 18091
	p := cri.RunPod(t, c, "flushed", cri.HostPort(port))
	p.Serves(cri.OutsideNetns, p.OnNode4(port))
	if out, err := exec.Command("sh", "-c", "nft flush ruleset && nft list ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("%v: a flush leaves %s", err, out)
	}
	begin := time.Now()
	checkWithin(t, 20*time.Second, "STATUS restores", func() error { return p.SeenAsNode() })
	t.Logf("restored after %s", time.Since(begin).Round(time.Millisecond))
	checkWithin(t, 20*time.Second, "STATUS restores antiSpoof", func() error {
		out, err := exec.Command("nft", "list", "tables").CombinedOutput()
		if err == nil && !strings.Contains(string(out), "bridge podlace_guard") {
			err = fmt.Errorf("tables: %s", out)
		}
		return err
	})
	p.Ignores(cri.OutsideNetns, p.OnNode4(port))
	restartCRIO(t, c, syscall.SIGKILL, nil)
	p.Ignores(cri.OutsideNetns, p.OnNode4(port))
	if got, err := c.Network(t.Context(), p.Sandbox); err != nil || got != p.Network {
		t.Errorf("after a restart the pod has %+v, %v: want %+v", got, err, p.Network)
	}
	p.Remove()
	again := cri.RunPod(t, c, "again", cri.HostPort(port))
	again.Serves(cri.OutsideNetns, again.OnNode4(port))
}
