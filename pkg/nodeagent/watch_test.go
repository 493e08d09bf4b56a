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

// lines is a log that a test reads while it is written.
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

// watching is a watch of a fake API server.
type watching struct {
	*nodes
	*fakeAPI
	log     *lines
	changes atomic.Int64
}

// newWatching starts a watch of a server with three nodes. The watch begins with start.
func newWatching(t *testing.T) *watching {
	w := &watching{fakeAPI: newFakeAPI(t), log: &lines{}}
	w.nodes = newNodes(func() { w.changes.Add(1) }, slog.New(slog.NewTextHandler(w.log, nil)))
	for i := range 3 {
		w.put(nodeObject(fmt.Sprintf("n%d", i), []string{fmt.Sprintf("10.244.%d.0/24", i)}, []string{fmt.Sprintf("192.0.2.%d", i)}))
	}
	return w
}

func (w *watching) start(url string) {
	c, err := client(w.kubeconfig(url), "", newConnections())
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); watchNodes(ctx, c, w.nodes) }()
	w.t.Cleanup(func() { stop(); <-done })
}

// has reports whether exactly these nodes are known.
func (w *watching) has(names ...string) bool {
	list, _, complete := w.nodes.list()
	var got []string
	for _, n := range list {
		got = append(got, n.Name)
	}
	return complete && fmt.Sprint(got) == fmt.Sprint(names)
}

func (w *watching) await(names ...string) {
	w.t.Helper()
	await(w.t, fmt.Sprint(names), func() bool { return w.has(names...) })
}

// awaitWatch waits until the API server has an open watch.
func (w *watching) awaitWatch() {
	w.t.Helper()
	await(w.t, "a watch", func() bool { w.fakeAPI.mu.Lock(); defer w.fakeAPI.mu.Unlock(); return len(w.watchers) > 0 })
}

// TestWatch checks that nodes are added, changed and deleted; that a change without effect on routes wakes no step; and that the list
// is streamed.
func TestWatch(t *testing.T) {
	w := newWatching(t)
	w.start(w.server.URL)
	w.await("n0", "n1", "n2")
	if w.asked("sendInitialEvents=true") != 1 || w.asked("limit=") != 0 {
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

// TestPages checks that lists are read in pages from an API server that cannot stream, and that this is not logged as a failure.
func TestPages(t *testing.T) {
	w := newWatching(t)
	w.Paged = true
	var names []string
	for i := range 1200 {
		names = append(names, fmt.Sprintf("n%04d", i))
		w.put(nodeObject(names[i], nil, nil))
	}
	for i := range 3 {
		w.remove(fmt.Sprintf("n%d", i), true)
	}
	w.start(w.server.URL)
	w.await(names...)
	if w.asked("limit=500") != 3 || w.asked("continue=1000") != 1 || w.asked("resourceVersion=0") != 0 {
		t.Errorf("want three pages: %q", w.requests)
	}
	w.awaitWatch()
	w.remove("n0007", false)
	w.await(append(append([]string{}, names[:7]...), names[8:]...)...)
	if w.log.String() != "" {
		t.Error(w.log)
	}
}

// TestTruncated checks that a truncated list is discarded, however often that happens.
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

// TestGone checks that after status 410, or an ended watch, nodes that the next complete list lacks are deleted, and that older events
// change nothing.
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
		// Out of order: the deletion of a node that the list lacks already, and of a node that was created again.
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
	}
}

// TestRefused checks that a refusing API server is logged once, with its reason, and that all known nodes stay.
func TestRefused(t *testing.T) {
	w := newWatching(t)
	w.start(w.server.URL)
	w.await("n0", "n1", "n2")
	w.fakeAPI.mu.Lock()
	w.Refuse = http.StatusForbidden
	w.fakeAPI.mu.Unlock()
	w.hangUp(true)
	await(t, "the failure is known", func() bool { _, failure := w.watched(); return strings.Contains(failure, "Forbidden") })
	await(t, "more requests", func() bool { return w.asked("") > 3 })
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

// TestLargeNode checks that a Node object with 10 MB of annotations is read: streamed, in a list, and after a change.
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

// TestHalfOpen checks that a half-open connection is abandoned, and that the watch continues over a new one.
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

// TestSilence checks that a silent API server is reported although its connection is open.
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

// TestClient checks that the error outside a cluster and without a kubeconfig says what is missing.
func TestClient(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := client("", "", newConnections()); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Error(err)
	}
	if _, err := client("/nowhere/kubeconfig", "", newConnections()); err == nil || !strings.Contains(err.Error(), "/nowhere/kubeconfig") {
		t.Error(err)
	}
}
