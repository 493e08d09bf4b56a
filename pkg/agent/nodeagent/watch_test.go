// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	kwatch "k8s.io/apimachinery/pkg/watch"
)

// lines is a log that a test can read while the agent writes to it.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lines) count(part string) int { return strings.Count(l.String(), part) }

type testWatch struct {
	*nodes
	*fakeAPI
	log     *lines
	changes atomic.Int64
}

// newWatching returns a watch of a fake API server with three nodes, which start starts.
func newWatching(t *testing.T) *testWatch {
	w := &testWatch{fakeAPI: newFakeAPI(t), log: &lines{}}
	w.nodes = newNodes(func() { w.changes.Add(1) }, slog.New(slog.NewTextHandler(w.log, nil)))
	for i := range 3 {
		w.put(nodeObject(fmt.Sprintf("n%d", i), []string{fmt.Sprintf("10.244.%d.0/24", i)}, []string{fmt.Sprintf("192.0.2.%d", i)}))
	}
	return w
}

func (w *testWatch) start(url string) {
	c, err := client(w.kubeconfig(url), "", newConnections())
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); watchNodes(ctx, c, w.nodes) }()
	w.t.Cleanup(func() { stop(); <-done })
}

// has reports whether the store has exactly the named nodes.
func (w *testWatch) has(names ...string) bool {
	list, _, complete := w.nodes.list()
	var got []string
	for _, n := range list {
		got = append(got, n.Name)
	}
	return complete && fmt.Sprint(got) == fmt.Sprint(names)
}

func (w *testWatch) await(names ...string) {
	w.t.Helper()
	await(w.t, fmt.Sprint(names), func() bool { return w.has(names...) })
}

func (w *testWatch) awaitWatch() {
	w.t.Helper()
	await(w.t, "a watch", func() bool { w.fakeAPI.mu.Lock(); defer w.fakeAPI.mu.Unlock(); return len(w.watchers) > 0 })
}

// TestWatch: the store follows added, changed and deleted nodes, reads the list as a stream, and does not call changed for a change that
// does not affect routes.
func TestWatch(t *testing.T) {
	w := newWatching(t)
	w.start(w.server.URL)
	w.await("n0", "n1", "n2")
	if w.countRequests("sendInitialEvents=true") != 1 || w.countRequests("limit=") != 0 {
		t.Errorf("want a stream and no list: %q", w.requests)
	}
	list, _, _ := w.nodes.list()
	if n := list[1]; fmt.Sprint(n.PodCIDRs, n.Addresses) != "[10.244.1.0/24] [192.0.2.1]" || n.UID != "uid-n1" ||
		n.Created.Unix() != 1_000_000 {
		t.Errorf("%+v", n)
	}
	before := w.changes.Load()
	n := nodeObject("n1", []string{"10.244.1.0/24"}, []string{"192.0.2.1"})
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}}
	heard, _ := w.watched()
	w.put(n)
	await(t, "the heartbeat is heard", func() bool { now, _ := w.watched(); return now.After(heard) })
	if w.changes.Load() != before {
		t.Error("a heartbeat of a kubelet woke the agent")
	}
	w.put(nodeObject("n3", nil, nil))
	w.await("n0", "n1", "n2", "n3")
	w.remove("n0", false)
	w.await("n1", "n2", "n3")
	if _, since, _ := w.nodes.list(); !since.IsZero() {
		t.Error("a change is told twice")
	}
	for range 3 {
		w.emit(w.bookmark(false))
	}
}

// TestPages: if the API server cannot stream lists, they are read in pages without a logged failure.
func TestPages(t *testing.T) {
	w := newWatching(t)
	w.Paged = true
	var names []string
	for i := range 240 {
		names = append(names, fmt.Sprintf("n%04d", i))
		w.put(nodeObject(names[i], nil, nil))
	}
	for i := range 3 {
		w.remove(fmt.Sprintf("n%d", i), true)
	}
	w.start(w.server.URL)
	w.await(names...)
	if w.countRequests("limit=100") != 3 || w.countRequests("continue=200") != 1 || w.countRequests("resourceVersion=0") != 0 {
		t.Errorf("want three pages: %q", w.requests)
	}
	w.awaitWatch()
	w.remove("n0007", false)
	w.await(append(append([]string{}, names[:7]...), names[8:]...)...)
	if w.log.String() != "" {
		t.Error(w.log)
	}
}

// TestTruncated: truncated lists are discarded, even several in a row.
func TestTruncated(t *testing.T) {
	for _, paged := range []bool{false, true} {
		w := newWatching(t)
		w.Paged, w.Cut = paged, 2
		var seen atomic.Bool
		w.changed = func() {
			if list, _, complete := w.nodes.list(); complete && len(list) < 3 {
				seen.Store(true)
			}
		}
		w.start(w.server.URL)
		w.await("n0", "n1", "n2")
		w.fakeAPI.mu.Lock()
		if seen.Load() || w.Cut > 0 {
			t.Errorf("paged %t: half a list counted as a whole one, or none was cut (%d)", paged, w.Cut)
		}
		w.fakeAPI.mu.Unlock()
	}
}

// TestGone: after the end of a watch, with or without status 410, the store has the nodes of the next complete list and no others. Outdated
// events change nothing.
func TestGone(t *testing.T) {
	for _, paged := range []bool{false, true} {
		w := newWatching(t)
		w.Paged = paged
		w.start(w.server.URL)
		w.await("n0", "n1", "n2")
		w.awaitWatch()
		old := w.fakeAPI.nodes["n1"].DeepCopy()
		w.remove("n1", true)
		w.put(nodeObject("n4", nil, nil))
		w.hangUp(true)
		w.await("n0", "n2", "n4")
		// Two outdated DELETED events come: one when the node is already missing from the list, one after it was created again with another
		// UID.
		w.awaitWatch()
		w.emit(kwatch.Event{Type: kwatch.Deleted, Object: old})
		again := nodeObject("n1", nil, nil)
		again.UID = "uid-of-another"
		w.put(again)
		w.emit(kwatch.Event{Type: kwatch.Deleted, Object: old})
		w.put(nodeObject("n5", nil, nil))
		w.await("n0", "n1", "n2", "n4", "n5")
		w.fakeAPI.mu.Lock()
		w.GoneOnce = true
		w.fakeAPI.mu.Unlock()
		w.hangUp(false)
		await(t, "410 is answered", func() bool { w.fakeAPI.mu.Lock(); defer w.fakeAPI.mu.Unlock(); return !w.GoneOnce })
		w.awaitWatch()
		w.remove("n5", true)
		w.hangUp(true)
		w.await("n0", "n1", "n2", "n4")
		if n := w.countRequests("limit=100&resourceVersion="); n > 0 {
			t.Errorf("%d lists want the version that the API server no longer watches, and would get it again and again", n)
		}
	}
}

// TestRefused: if the API server refuses the requests, one line gives the reason, and all known nodes stay.
func TestRefused(t *testing.T) {
	w := newWatching(t)
	w.start(w.server.URL)
	w.await("n0", "n1", "n2")
	w.fakeAPI.mu.Lock()
	w.Refuse = http.StatusForbidden
	w.fakeAPI.mu.Unlock()
	w.hangUp(true)
	await(t, "the failure is known", func() bool { _, failure := w.watched(); return strings.Contains(failure, "Forbidden") })
	if advice := w.advice(); !strings.Contains(advice, "ClusterRoleBinding") {
		t.Errorf("advice %q does not name the missing objects", advice)
	}
	await(t, "more requests", func() bool { return w.countRequests("") > 3 })
	if !w.has("n0", "n1", "n2") || w.log.count("level=WARN") != 1 {
		t.Errorf("want all nodes and one line: %s", w.log)
	}
	w.fakeAPI.mu.Lock()
	w.Refuse = 0
	w.fakeAPI.mu.Unlock()
	await(t, "recovery", func() bool { _, failure := w.watched(); return failure == "" })
	if w.log.count("watched again") != 1 {
		t.Error(w.log)
	}
}

// TestLargeNode reads a Node object with 10 MB of annotations from a stream, a list and an event.
func TestLargeNode(t *testing.T) {
	for _, paged := range []bool{false, true} {
		w := newWatching(t)
		w.Paged = paged
		n := nodeObject("n9", []string{"10.244.9.0/24"}, nil)
		n.Annotations = map[string]string{"a": strings.Repeat("x", 10<<20)}
		w.put(n)
		w.start(w.server.URL)
		w.await("n0", "n1", "n2", "n9")
		w.awaitWatch()
		n = n.DeepCopy()
		n.Spec.PodCIDRs[0] = "10.244.10.0/24"
		w.put(n)
		await(t, "the change", func() bool { list, _, _ := w.nodes.list(); return list[3].PodCIDRs[0] == "10.244.10.0/24" })
	}
}

// TestHalfOpen: a half-open connection is closed, and the watch continues over a new one.
func TestHalfOpen(t *testing.T) {
	t.Setenv("HTTP2_READ_IDLE_TIMEOUT_SECONDS", "1") // client-go's default is 30
	t.Setenv("HTTP2_PING_TIMEOUT_SECONDS", "1")      // the default is 15
	w := newWatching(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var swallow atomic.Bool // drops data of open connections
	var open atomic.Int64
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", w.server.Listener.Addr().String())
			if err != nil {
				near.Close()
				continue
			}
			first := open.Add(1) == 1
			pass := func(to, from net.Conn) {
				buffer := make([]byte, 64<<10)
				for {
					n, err := from.Read(buffer)
					if err != nil {
						to.Close()
						return
					}
					if first && swallow.Load() {
						continue
					}
					if _, err := to.Write(buffer[:n]); err != nil {
						return
					}
				}
			}
			go pass(near, far)
			go pass(far, near)
		}
	}()
	w.start("https://" + l.Addr().String())
	w.await("n0", "n1", "n2")
	swallow.Store(true)
	w.put(nodeObject("n3", nil, nil))
	w.await("n0", "n1", "n2", "n3")
	if open.Load() < 2 {
		t.Errorf("%d connections: want a second one", open.Load())
	}
}

// TestSilence: watched reports a failure if nothing comes for a long time over an open connection.
func TestSilence(t *testing.T) {
	n := newNodes(func() {}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if _, failure := n.watched(); failure != "" {
		t.Error(failure)
	}
	n.lastEvent = time.Now().Add(-watchTimeout - time.Second)
	if _, failure := n.watched(); failure == "" {
		t.Error("silence is not told")
	}
	if err := n.Bookmark("7"); err != nil {
		t.Error(err)
	}
	if _, failure := n.watched(); failure != "" {
		t.Error(failure)
	}
}

// TestClient calls client outside a cluster, without a kubeconfig and with a missing one.
func TestClient(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := client("", "", newConnections()); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error(err)
	}
	if _, err := client("/nowhere/kubeconfig", "", newConnections()); err == nil || !strings.Contains(err.Error(), "/nowhere/kubeconfig") {
		t.Error(err)
	}
}

// TestEndlessAnswer: an answer of the API server that does not end is refused before it fills the memory, and the reason is shown.
func TestEndlessAnswer(t *testing.T) {
	w := newWatching(t)
	w.Paged, w.Endless = true, true
	w.start(w.server.URL)
	await(t, "the reason is shown", func() bool {
		_, failure := w.watched()
		return strings.Contains(failure, "the answer of the API server is larger than 16777216 bytes")
	})
	w.fakeAPI.mu.Lock()
	w.Endless = false
	w.fakeAPI.mu.Unlock()
	await(t, "all nodes are known", func() bool { return w.has("n0", "n1", "n2") })
}
