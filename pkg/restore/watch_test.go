// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// bench runs a watcher without a kernel.
type bench struct {
	watcher
	removals chan kernel.Removal

	mu    sync.Mutex
	text  strings.Builder // log
	began []time.Duration // of the comparisons, since the start
	looks []Look
}

// run runs a watcher during do. found is what each comparison restores or its error.
func run(t *testing.T, found func() error, do func(b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		b := &bench{removals: make(chan kernel.Removal)}
		b.watcher = watcher{log: slog.New(slog.NewTextHandler(b, nil)), removals: b.removals}
		b.report = func(l Look) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.looks = append(b.looks, l)
		}
		b.all = func(log *slog.Logger) error {
			b.mu.Lock()
			b.began = append(b.began, time.Since(start))
			err := found()
			b.mu.Unlock()
			time.Sleep(10 * time.Millisecond)
			if err == nil {
				log.With("a", 1).Info("guards are missing")
			}
			if err == errNothing {
				err = nil
			}
			return err
		}
		ctx, stop := context.WithCancel(t.Context())
		go b.watch(ctx)
		time.Sleep(2 * time.Second)
		do(b)
		stop()
		synctest.Wait()
	})
}

// Write implements io.Writer for the log.
func (b *bench) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(text)
}

// heard returns the log, the times of comparisons since the previous call, and the last outcome.
func (b *bench) heard() (log string, began []time.Duration, last Look) {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	began, b.began = b.began, nil
	return b.text.String(), began, b.looks[len(b.looks)-1]
}

var errNothing = errors.New("nothing is missing")

func (b *bench) expect(t *testing.T, what string, began ...time.Duration) {
	t.Helper()
	time.Sleep(2 * time.Second)
	_, got, _ := b.heard()
	if len(got) != len(began) {
		t.Fatalf("%s: comparisons at %v, want %v", what, got, began)
	}
	for i := range got {
		if got[i] != began[i] {
			t.Errorf("%s: comparisons at %v, want %v", what, got, began)
		}
	}
}

// TestPace: a comparison comes after 100 ms of quiet, after a second at the latest, and never within a second of the previous one.
func TestPace(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	run(t, func() error { return errNothing }, func(b *bench) {
		b.expect(t, "start", 0) // until 4 s
		b.removals <- kernel.Removal{What: "rules", By: "nft"}
		b.expect(t, "one removal", 4*s+100*ms)
		b.expect(t, "nothing") // until 8 s
		for range 30 {
			b.removals <- kernel.Removal{What: "a route"}
			time.Sleep(50 * ms)
		}
		b.expect(t, "a flood", 9*s, 10*s) // until 11.5 s
		b.removals <- kernel.Removal{What: "a route"}
		time.Sleep(200 * ms)
		b.removals <- kernel.Removal{What: "a route"}
		b.expect(t, "a second one", 11*s+610*ms, 12*s+610*ms)
		time.Sleep(lookEvery)
		if log, began, _ := b.heard(); len(began) != 1 || log != "" {
			t.Errorf("%v, log %s", began, log)
		}
	})
}

// TestFight: after the first repairs, one message says that another program removes what is restored, and comparisons become rare.
func TestFight(t *testing.T) {
	run(t, func() error { return nil }, func(b *bench) {
		b.heard()
		end := time.Now().Add(10 * time.Minute)
		for time.Now().Before(end) {
			b.removals <- kernel.Removal{What: "rules in table podlace_guard", By: "nft"}
			time.Sleep(100 * time.Millisecond)
		}
		log, began, last := b.heard()
		if strings.Count(log, "keeps removing") != 1 || !strings.Contains(log, `removed="rules in table podlace_guard by nft"`) ||
			strings.Count(log, "\n") > FreeRepairs+1 {
			t.Errorf("log:\n%s", log)
		}
		if n := len(began); n < 20 || n > 40 {
			t.Errorf("%d comparisons in 10 minutes", n)
		}
		if last.Contested != "rules in table podlace_guard by nft" || last.Restored != 1 {
			t.Errorf("%+v", last)
		}
	})
}

// TestSlowFight: a program that removes rules every few minutes is contested, too, but its removals are restored without a delay. After ten
// minutes of quiet it is forgotten.
func TestSlowFight(t *testing.T) {
	var quietNow atomic.Bool
	found := func() error {
		if quietNow.Load() {
			return errNothing
		}
		return nil
	}
	run(t, found, func(b *bench) {
		for range 2 * FreeRepairs {
			time.Sleep(3 * time.Minute)
			b.heard()
			b.removals <- kernel.Removal{What: "link cni0"}
			time.Sleep(quiet + 50*time.Millisecond)
			if _, began, _ := b.heard(); len(began) != 1 {
				t.Errorf("not restored after %v: %v", quiet, began)
			}
		}
		if log, _, last := b.heard(); last.Contested != "link cni0" || strings.Count(log, "keeps removing") != 1 {
			t.Errorf("%+v, log:\n%s", last, log)
		}
		quietNow.Store(true)
		time.Sleep(3 * lookEvery)
		if _, _, last := b.heard(); last.Contested != "" {
			t.Errorf("%+v", last)
		}
	})
}

// TestConcerns: the watcher hears of Podlace's tables and of the iptables chains that may be Podlace's, and not of its own programs.
func TestConcerns(t *testing.T) {
	for place, want := range map[[2]string]bool{{"podlace_guard", "x"}: true, {"podlace_hostport", ""}: true, {"nat", "CNI-1"}: true,
		{"nat", ""}: true, {"nat", "KUBE-SVC"}: false, {"filter", "FORWARD"}: false, {"kube-proxy", "services"}: false} {
		if got := concernsPods(place[0], place[1]); got != want {
			t.Errorf("%v: %t", place, got)
		}
	}
	for program, want := range map[string]bool{"bridge": true, "portmap": true, "podlace-bridge": true, "podlace-portmap": true,
		"podlace-pod": true, "podlace": true, "podlace-node": true, "nft": false, "": false} {
		if got := isOwn(program); got != want {
			t.Errorf("%q: %t", program, got)
		}
	}
}

// TestFailure: an error is logged once, and the comparison repeated with growing delays. Success is not logged.
func TestFailure(t *testing.T) {
	failure := errors.New("link veth1 is missing")
	run(t, func() error { return failure }, func(b *bench) {
		time.Sleep(time.Hour)
		log, began, last := b.heard()
		if n := len(began); n < 14 || n > 18 || strings.Count(log, "link veth1 is missing") != 1 {
			t.Errorf("%d comparisons in an hour, log:\n%s", n, log)
		}
		if !errors.Is(last.Err, failure) {
			t.Errorf("%+v", last)
		}
		b.mu.Lock()
		failure = errNothing
		b.mu.Unlock()
		time.Sleep(lookEvery)
		if after, _, last := b.heard(); after != log || last.Err != nil {
			t.Errorf("after the failure: %+v, log:\n%s", last, after)
		}
	})
}

// TestRepairLogged: one line says what was removed, by whom, and what was found missing, each message once with its number.
func TestRepairLogged(t *testing.T) {
	run(t, func() error { return nil }, func(b *bench) {
		b.removals <- kernel.Removal{What: "rules in table podlace_guard", By: "nft"}
		time.Sleep(2 * time.Second)
		log, _, _ := b.heard()
		want := `msg="restored what was removed" removed="rules in table podlace_guard by nft" found="guards are missing (1)" took=10ms`
		if strings.Count(log, want) != 1 {
			t.Errorf("want one line with\n%s\nin\n%s", want, log)
		}
	})
	var done tally
	for _, text := range []string{"a", "b", "a"} {
		slog.New(&done).Info(text)
	}
	if got := done.String(); got != "a (2); b (1)" {
		t.Errorf("%q", got)
	}
}
