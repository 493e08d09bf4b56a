// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	kwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// fakeAPI stores nodes and ResourceSlices of resource.k8s.io/v1. Like a real API server, it speaks JSON and protobuf over HTTP/2.
type fakeAPI struct {
	t      testing.TB
	server *httptest.Server

	mu       sync.Mutex
	version  int64
	nodes    map[string]types.UID
	slices   map[string]*resourceapi.ResourceSlice
	watchers map[chan kwatch.Event]bool
	requests []string // verb and resource of each request, in order

	old         bool           // it lacks resource.k8s.io/v1
	refuse      map[string]int // HTTP status of refused requests, by verb or "*"
	invalid     string         // name of a device that makes a slice invalid
	onlyTainted bool           // only if the device has taints
	noTaints    bool           // it drops taints
	noCounters  bool           // it drops counters
	refuseMixed bool           // it refuses counters in separate slices, as API servers before 1.35 do
	delay       time.Duration  // before each answer
	muted       bool           // watches receive no events
}

// newFakeAPI starts a fake API server that runs until the test ends.
func newFakeAPI(t testing.TB) *fakeAPI {
	f := &fakeAPI{t: t, version: 100, nodes: map[string]types.UID{"node-a": "uid-1"}, slices: map[string]*resourceapi.ResourceSlice{},
		watchers: map[chan kwatch.Event]bool{}, refuse: map[string]int{}}
	f.server = httptest.NewUnstartedServer(f)
	f.server.EnableHTTP2 = true
	f.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	f.server.StartTLS()
	t.Cleanup(func() { f.server.CloseClientConnections(); f.server.Close() })
	return f
}

// newClient returns a client of the fake API server, with its own HTTP transport.
func (f *fakeAPI) newClient() kubernetes.Interface {
	c, err := kubernetes.NewForConfig(&rest.Config{Host: f.server.URL, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true,
		ServerName: strings.ToLower(strings.ReplaceAll(f.t.Name(), "/", "-"))}})
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

// configure changes settings of the fake API server while the server is locked.
func (f *fakeAPI) configure(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeAPI) storedSlices() (all []resourceapi.ResourceSlice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.slices {
		all = append(all, *s.DeepCopy())
	}
	slices.SortFunc(all, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (f *fakeAPI) countRequests(verb string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.requests {
		if strings.HasPrefix(r, verb+" ") {
			n++
		}
	}
	return n
}

// countWrites returns the number of write requests, including refused requests.
func (f *fakeAPI) countWrites() int {
	return f.countRequests("create") + f.countRequests("update") + f.countRequests("delete")
}

// removeSlices deletes ResourceSlices, as a kubelet or a user could. If quiet, watchers get no event, as if their watch were broken.
func (f *fakeAPI) removeSlices(quiet bool, names ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.slices {
		if len(names) == 0 || slices.Contains(names, name) {
			f.delete(name, quiet)
		}
	}
}

func (f *fakeAPI) delete(name string, quiet bool) {
	s := f.slices[name].DeepCopy()
	delete(f.slices, name)
	f.version++
	s.ResourceVersion = fmt.Sprint(f.version)
	if !quiet {
		f.send(kwatch.Event{Type: kwatch.Deleted, Object: s})
	}
}

// editSlice changes a stored slice, as a user could do with kubectl.
func (f *fakeAPI) editSlice(name string, change func(*resourceapi.ResourceSlice)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.slices[name].DeepCopy()
	change(s)
	f.store(s, kwatch.Modified)
}

func (f *fakeAPI) store(s *resourceapi.ResourceSlice, event kwatch.EventType) {
	f.version++
	s.TypeMeta = metav1.TypeMeta{Kind: "ResourceSlice", APIVersion: "resource.k8s.io/v1"}
	s.ResourceVersion = fmt.Sprint(f.version)
	f.slices[s.Name] = s
	f.send(kwatch.Event{Type: event, Object: s.DeepCopy()})
}

func (f *fakeAPI) send(e kwatch.Event) {
	for w := range f.watchers {
		if !f.muted {
			w <- e
		}
	}
}

// isWatched reports whether any client's watch receives events, which it does some time after the server has accepted it.
func (f *fakeAPI) isWatched() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.watchers) > 0
}

// endWatches ends all watches, with HTTP status 410 if `gone`.
func (f *fakeAPI) endWatches(gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for w := range f.watchers {
		if gone {
			w <- kwatch.Event{Type: kwatch.Error, Object: failure(http.StatusGone)}
		}
		close(w)
		delete(f.watchers, w)
	}
}

func failure(code int) *metav1.Status {
	reason := map[int]metav1.StatusReason{http.StatusGone: metav1.StatusReasonExpired, http.StatusForbidden: metav1.StatusReasonForbidden,
		http.StatusUnprocessableEntity: metav1.StatusReasonInvalid, http.StatusNotFound: metav1.StatusReasonNotFound,
		http.StatusConflict: metav1.StatusReasonConflict}[code]
	return &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason,
		Message: http.StatusText(code)}
}

func verbOf(r *http.Request) string {
	switch {
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/"):
		return "node"
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		return "watch"
	case r.Method == http.MethodGet:
		return "list"
	}
	return map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodDelete: "delete"}[r.Method]
}

// ServeHTTP serves requests for one Node and its ResourceSlices.
func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	what, name := verbOf(r), path.Base(r.URL.Path)
	f.requests = append(f.requests, what+" "+name)
	code, delay := max(f.refuse[what], f.refuse["*"]), f.delay
	if f.old && what != "node" {
		code = http.StatusNotFound
	}
	f.mu.Unlock()
	time.Sleep(delay)
	media := runtime.ContentTypeJSON
	if strings.Contains(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		media = runtime.ContentTypeProtobuf
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), media)
	if code == 0 && what == "watch" {
		f.watch(w, r, info)
		return
	}
	answer := runtime.Object(failure(code))
	if code == 0 {
		body, _ := io.ReadAll(r.Body)
		f.mu.Lock()
		answer, code = f.answer(what, name, body)
		f.mu.Unlock()
	}
	w.Header().Set("Content-Type", info.MediaType)
	w.WriteHeader(code)
	_ = info.Serializer.Encode(answer, w)
}

func (f *fakeAPI) answer(what, name string, body []byte) (runtime.Object, int) {
	switch what {
	case "node":
		if uid, ok := f.nodes[name]; ok {
			n := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}}
			n.Name, n.UID = name, uid
			return n, http.StatusOK
		}
		return failure(http.StatusNotFound), http.StatusNotFound
	case "list":
		list := &resourceapi.ResourceSliceList{TypeMeta: metav1.TypeMeta{Kind: "ResourceSliceList", APIVersion: "resource.k8s.io/v1"}}
		list.ResourceVersion = fmt.Sprint(f.version)
		for _, s := range f.slices {
			list.Items = append(list.Items, *s.DeepCopy())
		}
		return list, http.StatusOK
	case "delete":
		if f.slices[name] == nil {
			return failure(http.StatusNotFound), http.StatusNotFound
		}
		f.delete(name, false)
		return &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Success"}, http.StatusOK
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	s, ok := object.(*resourceapi.ResourceSlice)
	if err != nil || !ok {
		return failure(http.StatusBadRequest), http.StatusBadRequest
	}
	return f.writeSlice(what, s)
}

func (f *fakeAPI) writeSlice(what string, s *resourceapi.ResourceSlice) (runtime.Object, int) {
	if field := f.invalidField(s); field != "" {
		status := failure(http.StatusUnprocessableEntity)
		status.Message = "ResourceSlice is invalid: " + field + ": no"
		return status, int(status.Code)
	}
	f.dropFields(s)
	event := kwatch.Modified
	if what == "create" {
		event = kwatch.Added
		f.version++
		s.Name, s.UID = fmt.Sprintf("%s%05x", s.GenerateName, f.version), types.UID(fmt.Sprint("slice-", f.version))
	} else if before := f.slices[s.Name]; before == nil {
		return failure(http.StatusNotFound), http.StatusNotFound
	} else if before.ResourceVersion != s.ResourceVersion {
		return failure(http.StatusConflict), http.StatusConflict
	}
	f.store(s, event)
	return s.DeepCopy(), http.StatusOK
}

// invalidField returns the name of an invalid field in a slice, or "" if the slice is valid.
func (f *fakeAPI) invalidField(s *resourceapi.ResourceSlice) string {
	if f.refuseMixed && len(s.Spec.SharedCounters) > 0 && len(s.Spec.Devices) == 0 {
		return "spec.sharedCounters"
	}
	for i, d := range s.Spec.Devices {
		if f.invalid != "" && d.Name == f.invalid && (!f.onlyTainted || len(d.Taints) > 0) {
			return fmt.Sprintf("spec.devices[%d].name", i)
		}
	}
	return ""
}

// dropFields removes the fields that the simulated server version does not support, and sets missing times.
func (f *fakeAPI) dropFields(s *resourceapi.ResourceSlice) {
	if f.noCounters {
		s.Spec.SharedCounters = nil
	}
	for i := range s.Spec.Devices {
		d := &s.Spec.Devices[i]
		if f.noTaints {
			d.Taints = nil
		}
		if f.noCounters {
			d.ConsumesCounters = nil
		}
		for j := range d.Taints {
			if d.Taints[j].TimeAdded == nil {
				d.Taints[j].TimeAdded = &metav1.Time{Time: time.Now()}
			}
		}
	}
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, info runtime.SerializerInfo) {
	w.Header().Set("Content-Type", info.MediaType+";stream=watch")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	out := streaming.NewEncoder(info.StreamSerializer.NewFrameWriter(w), info.StreamSerializer.Serializer)
	events := make(chan kwatch.Event, 10_000)
	f.configure(func() { f.watchers[events] = true })
	for {
		select {
		case <-r.Context().Done():
			f.configure(func() { delete(f.watchers, events) })
			return
		case e, ok := <-events:
			if !ok {
				return
			}
			var text strings.Builder
			_ = info.Serializer.Encode(e.Object, &text)
			_ = out.Encode(&metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: []byte(text.String())}})
			w.(http.Flusher).Flush()
		}
	}
}

// await waits until so returns true. The time limit of one minute is long enough for a loaded machine.
func await(t testing.TB, what string, so func() bool) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
