// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// Look is the outcome of one comparison by Watch.
type Look struct {
	Restored  int    // changes
	Err       error  // what could not be restored
	Contested string // what another program keeps removing, with its name if known; usually empty
}

// Watch calls All at the start, after each removal that the kernel reports, after errors, and in any case once in lookEvery. It logs what
// was restored and calls report after each comparison, until ctx ends.
func Watch(ctx context.Context, log *slog.Logger, report func(Look)) error {
	removals, err := kernel.Removals(ctx, concernsPods, isOwn)
	if err != nil {
		return err
	}
	log.Info("watching what other programs remove of the pods' network")
	w := watcher{log: log, all: All, report: report, removals: removals}
	w.watch(ctx)
	return nil
}

func (w *watcher) watch(ctx context.Context) {
	for why, ok := (kernel.Removal{What: "before the start"}), true; ok; {
		began := time.Now()
		w.look(why)
		why, ok = w.wait(ctx, began)
	}
}

// concernsPods reports whether pods may need rules of a chain, or of a table if chain is "". kube-proxy changes its own chains all the
// time.
func concernsPods(table, chain string) bool {
	return strings.HasPrefix(table, "podlace_") || table == "nat" && !strings.HasPrefix(chain, "KUBE-")
}

// isOwn reports whether Podlace itself removed rules, as DEL does.
func isOwn(program string) bool {
	return slices.Contains([]string{"bridge", "portmap", "podlace-bridge", "podlace-portmap", "podlace-pod", "podlace", "podlace-node"},
		program)
}

// Intervals. While another program keeps removing state, the Contest makes leastPause longer.
const (
	quiet      = 100 * time.Millisecond // without another removal before a comparison
	mostQuiet  = time.Second            // of waiting for that
	leastPause = time.Second            // from one comparison to the next
	idleShare  = 4                      // the pause is at least this many times as long as the comparison
	lookEvery  = 10 * time.Minute       // for settings that the kernel does not report, such as most sysctls
)

type watcher struct {
	log      *slog.Logger
	all      func(*slog.Logger) error
	report   func(Look)
	removals <-chan kernel.Removal
	contest  Contest
	removed  string        // what is contested
	failure  string        // text of the last error
	retry    time.Duration // delay until the next comparison after an error
}

// look compares once.
func (w *watcher) look(why kernel.Removal) {
	var done tally
	began := time.Now()
	err := w.all(slog.New(&done))
	now := time.Now()
	switch {
	case len(done) > 0 && w.contest.NoteRepair(now):
		w.removed = why.String()
		w.log.Warn("another program keeps removing what pods need: it is restored more and more slowly, at least once in 30 s, without further "+
			"messages, until that program is stopped", "removed", w.removed)
	case !w.contest.On(now):
		w.removed = ""
	}
	if len(done) > 0 && w.removed == "" {
		w.log.Info("restored what was removed", "removed", why, "found", done.String(), "took", now.Sub(began))
	}
	failure := ""
	if err == nil {
		w.retry = 0
	} else {
		failure, w.retry = err.Error(), min(max(2*w.retry, leastPause), lookEvery)
	}
	if failure != "" && failure != w.failure {
		w.log.Warn("not everything could be restored; trying again", "error", err)
	}
	w.failure = failure
	w.report(Look{Restored: len(done), Err: err, Contested: w.removed})
}

// wait returns the removal for which to compare next; the last comparison began at began. ok is false if ctx has ended.
func (w *watcher) wait(ctx context.Context, began time.Time) (why kernel.Removal, ok bool) {
	earliest := began.Add(max(leastPause, idleShare*time.Since(began), w.contest.Wait(time.Now())))
	due, last := time.After(max(cmp.Or(w.retry, lookEvery), time.Until(earliest))), time.Time{}
	why = kernel.Removal{What: "what the kernel does not report"}
	for {
		select {
		case <-ctx.Done():
			return why, false
		case r, open := <-w.removals:
			if !open {
				return why, false
			}
			now := time.Now()
			if last.IsZero() {
				last = later(now, earliest).Add(mostQuiet)
			}
			if why.By == "" {
				why = r
			}
			due = time.After(min(later(now.Add(quiet), earliest).Sub(now), last.Sub(now)))
		case <-due:
			return why, true
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// tally is a slog.Handler that collects the messages of All, which logs one for each repair.
type tally []string

// Enabled implements slog.Handler.
func (*tally) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (t *tally) Handle(_ context.Context, r slog.Record) error {
	*t = append(*t, r.Message)
	return nil
}

// WithAttrs implements slog.Handler.
func (t *tally) WithAttrs([]slog.Attr) slog.Handler { return t }

// WithGroup implements slog.Handler.
func (t *tally) WithGroup(string) slog.Handler { return t }

// String returns each message once, with its number.
func (t *tally) String() string {
	count, order := map[string]int{}, []string(nil)
	for _, text := range *t {
		if count[text]++; count[text] == 1 {
			order = append(order, text)
		}
	}
	for i, text := range order {
		order[i] = fmt.Sprintf("%s (%d)", text, count[text])
	}
	return strings.Join(order, "; ")
}
