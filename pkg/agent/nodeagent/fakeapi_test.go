// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	kwatch "k8s.io/apimachinery/pkg/watch"
)

// fakeAPI serves Node objects like an API server: lists, streamed lists and watches over HTTP/2 in protobuf.
type fakeAPI struct {
	t      testing.TB
	server *httptest.Server

	mu       sync.Mutex
	version  int64
	nodes    map[string]*corev1.Node
	watchers map[chan kwatch.Event]bool
	requests []string // queries, in order
	events   []corev1.Event

	Paged    bool // the server cannot stream lists
	Cut      int  // number of lists that are truncated in the middle
	Refuse   int  // status of every answer; 0: no error
	GoneOnce bool // the next watch ends with 410
	Endless  bool // answers have 64 MiB
	Mute     bool // requests for Events get no answer
}

func newFakeAPI(t testing.TB) *fakeAPI {
	f := &fakeAPI{t: t, version: 100, nodes: map[string]*corev1.Node{}, watchers: map[chan kwatch.Event]bool{}}
	f.server = httptest.NewUnstartedServer(f)
	f.server.EnableHTTP2 = true
	f.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	f.server.StartTLS()
	t.Cleanup(func() { f.server.CloseClientConnections(); f.server.Close() })
	return f
}

// kubeconfig writes a kubeconfig for a URL of the fake API server and returns its path. Each test uses its own server name, because
// client-go shares transports between equal configurations.
func (f *fakeAPI) kubeconfig(url string) string {
	path := filepath.Join(f.t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c"}}],
"clusters": [{"name": "c", "cluster": {"server": %q, "insecure-skip-tls-verify": true, "tls-server-name": %q}}]}`, url,
		strings.ToLower(f.t.Name()))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	return path
}

func nodeObject(name string, podCIDRs, addresses []string) *corev1.Node {
	n := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	n.Name, n.UID, n.CreationTimestamp = name, types.UID("uid-"+name), metav1.Unix(1_000_000, 0)
	n.Spec.PodCIDRs = podCIDRs
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// put creates or changes a Node object and sends the event.
func (f *fakeAPI) put(n *corev1.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	n.ResourceVersion = fmt.Sprint(f.version)
	kind := kwatch.Added
	if _, ok := f.nodes[n.Name]; ok {
		kind = kwatch.Modified
	}
	f.nodes[n.Name] = n
	f.send(kwatch.Event{Type: kind, Object: n.DeepCopy()})
}

// remove deletes a node. With quiet it sends no event, as if that happened while the watch was interrupted.
func (f *fakeAPI) remove(name string, quiet bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	n := f.nodes[name]
	n.ResourceVersion = fmt.Sprint(f.version)
	delete(f.nodes, name)
	if !quiet {
		f.send(kwatch.Event{Type: kwatch.Deleted, Object: n.DeepCopy()})
	}
}

func (f *fakeAPI) send(e kwatch.Event) {
	for w := range f.watchers {
		w <- e
	}
}

// emit sends an event to all watches and leaves the stored nodes unchanged.
func (f *fakeAPI) emit(e kwatch.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.send(e)
}

// hangUp ends all watches, with status 410 if gone.
func (f *fakeAPI) hangUp(gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.watchers {
		if gone {
			w <- kwatch.Event{Type: kwatch.Error, Object: status(http.StatusGone)}
		}
		close(w)
		delete(f.watchers, w)
	}
}

func status(code int) *metav1.Status {
	reason := map[int]metav1.StatusReason{http.StatusGone: metav1.StatusReasonExpired,
		http.StatusUnprocessableEntity: metav1.StatusReasonInvalid}[code]
	return &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason,
		Message: http.StatusText(code)}
}

// countRequests returns how many requests had a query with the given text.
func (f *fakeAPI) countRequests(part string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, query := range f.requests {
		if strings.Contains(query, part) {
			n++
		}
	}
	return n
}

// codec returns the serializer for a media type that the client accepts.
func codec(r *http.Request) runtime.SerializerInfo {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	if err := corev1.AddToScheme(scheme); err != nil {
		panic(err)
	}
	media := runtime.ContentTypeJSON
	if strings.Contains(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		media = runtime.ContentTypeProtobuf
	}
	info, _ := runtime.SerializerInfoForMediaType(serializer.NewCodecFactory(scheme).SupportedMediaTypes(), media)
	return info
}

// ServeHTTP serves lists and watches of nodes, and takes Events.
func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	f.mu.Lock()
	f.requests = append(f.requests, r.Method+" "+r.URL.String())
	refuse, endless := f.Refuse, f.Endless
	if r.URL.Path == "/api/v1/namespaces/default/events" && r.Method == http.MethodPost {
		var e corev1.Event
		body, _ := io.ReadAll(r.Body)
		if _, _, err := codec(r).Serializer.Decode(body, nil, &e); err == nil {
			f.events = append(f.events, e)
		}
		if f.Mute {
			f.mu.Unlock()
			<-r.Context().Done()
			return
		}
		refuse = http.StatusCreated
	} else if r.URL.Path != "/api/v1/nodes" || r.Method != http.MethodGet {
		refuse = http.StatusForbidden
	}
	if query.Get("sendInitialEvents") == "true" && f.Paged {
		refuse = http.StatusUnprocessableEntity
	}
	f.mu.Unlock()
	info := codec(r)
	switch {
	case endless:
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		_, _ = io.WriteString(w, `{"kind": "`+strings.Repeat("x", 64<<20))
	case refuse != 0:
		w.Header().Set("Content-Type", info.MediaType)
		w.WriteHeader(refuse)
		_ = info.Serializer.Encode(status(refuse), w)
	case query.Get("watch") == "true" || query.Get("watch") == "1":
		f.watch(w, r, info)
	default:
		f.list(w, r, info)
	}
}

// list sends one page of the list of nodes.
func (f *fakeAPI) list(w http.ResponseWriter, r *http.Request, info runtime.SerializerInfo) {
	f.mu.Lock()
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
	list.ResourceVersion = fmt.Sprint(f.version)
	limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	names := f.sortedNames()
	to := len(names)
	if limit > 0 && from+limit < to {
		to = from + limit
		list.Continue = strconv.Itoa(to)
	}
	for _, name := range names[from:to] {
		list.Items = append(list.Items, *f.nodes[name])
	}
	cut := f.Cut > 0
	f.Cut--
	f.mu.Unlock()
	var text strings.Builder
	_ = info.Serializer.Encode(list, &text)
	w.Header().Set("Content-Type", info.MediaType)
	if cut {
		w.Header().Set("Content-Length", strconv.Itoa(text.Len()))
		_, _ = io.WriteString(w, text.String()[:text.Len()/2])
		panic(http.ErrAbortHandler)
	}
	_, _ = io.WriteString(w, text.String())
}

func (f *fakeAPI) sortedNames() (names []string) {
	for name := range f.nodes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// watch streams events to a client. If the client wants initial events, all nodes and a bookmark come first.
func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, info runtime.SerializerInfo) {
	w.Header().Set("Content-Type", info.MediaType+";stream=watch")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	out := streaming.NewEncoder(info.StreamSerializer.NewFrameWriter(w), info.StreamSerializer.Serializer)
	send := func(e kwatch.Event) {
		var text strings.Builder
		_ = info.Serializer.Encode(e.Object, &text)
		_ = out.Encode(&metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: []byte(text.String())}})
		w.(http.Flusher).Flush()
	}
	events := make(chan kwatch.Event, 10_000)
	f.mu.Lock()
	if f.GoneOnce {
		f.GoneOnce = false
		f.mu.Unlock()
		send(kwatch.Event{Type: kwatch.Error, Object: status(http.StatusGone)})
		return
	}
	var first []kwatch.Event
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		names := f.sortedNames()
		cut := f.Cut > 0
		f.Cut--
		if cut {
			names = names[:len(names)/2]
		}
		for _, name := range names {
			first = append(first, kwatch.Event{Type: kwatch.Added, Object: f.nodes[name].DeepCopy()})
		}
		if cut {
			f.mu.Unlock()
			for _, e := range first {
				send(e)
			}
			return
		}
		first = append(first, f.bookmark(true))
	}
	f.watchers[events] = true
	f.mu.Unlock()
	for _, e := range first {
		send(e)
	}
	for {
		select {
		case <-r.Context().Done():
			f.mu.Lock()
			delete(f.watchers, events)
			f.mu.Unlock()
			return
		case e, ok := <-events:
			if !ok {
				return
			}
			send(e)
		}
	}
}

// bookmark returns a bookmark event, which ends the initial events if last.
func (f *fakeAPI) bookmark(last bool) kwatch.Event {
	b := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
	b.ResourceVersion = fmt.Sprint(f.version)
	if last {
		b.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	return kwatch.Event{Type: kwatch.Bookmark, Object: b}
}

// await waits for a condition. It fails the test after a minute, which suffices on a busy machine.
func await(t testing.TB, what string, so func() bool) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
