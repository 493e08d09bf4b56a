// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/store"
)

// panicEnv, if set, makes the test binary run an agent with these options, which panics when it logs a given message.
const panicEnv = "PODLACE_TEST_PANIC"

type panicOptions struct {
	options
	At string // part of the log line at which it panics
}

func panicking() (exit int) {
	var o panicOptions
	if err := json.Unmarshal([]byte(os.Getenv(panicEnv)), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	o.times = usualTimes()
	err := run(context.Background(), o.options, slog.New(panicHandler{slog.NewTextHandler(os.Stderr, nil), o.At}))
	fmt.Fprintln(os.Stderr, "it ended by itself:", err)
	return 1
}

type panicHandler struct {
	slog.Handler
	at string
}

func (h panicHandler) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.at) {
		panic("on purpose at " + h.at)
	}
	return h.Handler.Handle(ctx, r)
}

// TestPanic: a panic in any goroutine ends the process and leaves the files consistent. node.json may exist only if all routes do, and the
// conflist only if node.json does. The next start completes the setup.
func TestPanic(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		at               string
		refuse           int
		routes, n, ready bool // state after the panic
	}{
		{"installed plugins", 0, false, false, false},
		{"changed routes", 0, true, false, false},
		{"wrote node.json", 0, true, true, false},
		{"wrote the conflist", 0, true, true, true},
		{"are not watched", 503, false, false, false}, // a goroutine of client-go
	} {
		_, err := removeRoutes()
		kerneltest.Must(t, err, os.RemoveAll(store.Root), os.RemoveAll(l.dir+"/bin"), os.RemoveAll(l.dir+"/net.d"))
		l.api.refuseWith(c.refuse)
		text, err := json.Marshal(panicOptions{l.options, c.at})
		kerneltest.Must(t, err)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env, cmd.Stderr = append(os.Environ(), panicEnv+"="+string(text)), l.log
		kerneltest.Must(t, cmd.Start())
		timer := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
		err = cmd.Wait()
		if !timer.Stop() || cmd.ProcessState.ExitCode() != 2 || l.log.count("panic: on purpose at "+c.at) == 0 {
			t.Errorf("%s: it lived on, or ended otherwise: %v", c.at, err)
		}
		_, noNode := os.Stat(nodefile.Path)
		if routes := l.routes(); slices.Equal(routes, full(2, 3)) != c.routes || len(routes) > 0 != c.routes || (noNode == nil) != c.n ||
			(l.read("net.d/"+conflistName) == testConflist) != c.ready {
			t.Errorf("%s: routes %q, node.json %v, conflist %q", c.at, routes, noNode, l.read("net.d/"+conflistName))
		}
		l.api.refuseWith(0)
		_ = os.Remove(filepath.Join(store.Root, statusName))
		l.ready().has(full(2, 3))
		l.stop()
	}
}

// refuseWith makes the fake API server answer every request with the given HTTP status, or normally if it is 0.
func (f *fakeAPI) refuseWith(status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Refuse = status
}

// TestLostEvents: the agent reads the kernel's routes again after its netlink socket overflowed (ENOBUFS).
func TestLostEvents(t *testing.T) {
	l := newLab(t)
	cmd := l.startProcess("--log-level", "debug")
	t.Cleanup(func() { _, _ = cmd.Process.Signal(syscall.SIGCONT), cmd.Process.Kill(); _ = cmd.Wait() })
	l.await("ready", func() bool { return l.status().Ready })
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err, netlink.LinkSetAlias(link, "first")) // now the agent knows the link, and further events of it carry no news
	l.await("the link is known", func() bool { return l.log.count(`changed="link up0"`) > 0 })
	time.Sleep(5 * coalescing)
	if l.log.count("lost=true") > 0 || slices.Max(droppedMessages(t)) > 0 {
		t.Error("events were lost before")
	}
	kerneltest.Must(t, cmd.Process.Signal(syscall.SIGSTOP))
	for i := 0; slices.Max(droppedMessages(t)) == 0 && i < 100_000; i++ {
		kerneltest.Must(t, netlink.LinkSetAlias(link, fmt.Sprint("storm ", i)))
	}
	_, err = removeRoutes()
	kerneltest.Must(t, err)
	t.Logf("lost messages by socket: %v", droppedMessages(t))
	kerneltest.Must(t, cmd.Process.Signal(syscall.SIGCONT))
	l.has(full(2, 3))
	l.await("the loss is noticed", func() bool { return l.log.count("lost=true") > 0 }) // an event of the API server may come first
	if l.log.count(`changed="route 10.244.2.0/24"`) > 0 {
		t.Error("the event of the route was not lost")
	}
	kerneltest.Must(t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
}

// droppedMessages returns the number of dropped messages of each netlink socket in the namespace.
func droppedMessages(t *testing.T) (list []int) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/net/netlink")
	kerneltest.Must(t, err)
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line) // sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
		n := 0
		if len(fields) == 10 {
			_, _ = fmt.Sscan(fields[8], &n)
		}
		list = append(list, n)
	}
	return list
}

// quietAgent returns an agent without kernel and file events, whose functions tests call directly.
func (l *lab) quietAgent() *agent {
	l.Helper()
	c, err := readConfig(l.Config)
	kerneltest.Must(l, err)
	a := newAgent(l.options, c, slog.New(slog.NewTextHandler(l.log, nil)))
	var objects []any
	for _, n := range l.api.nodes {
		objects = append(objects, n)
	}
	kerneltest.Must(l, a.nodes.Replace(objects, "1"))
	a.alarm.wait(l.Context(), time.Now(), coalescing, 0)
	return a
}

// TestLook: without any event, the plugins, the conflist and node.json are restored within a minute. The log and a metric report each
// repair.
func TestLook(t *testing.T) {
	if usualTimes().poll > time.Minute {
		t.Errorf("files are looked at each %v", usualTimes().poll)
	}
	l := newLab(t)
	l.times.poll = 50 * time.Millisecond
	a := l.quietAgent()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); a.loop(ctx) }()
	defer func() { stop(); <-done }()
	l.await("ready", func() bool { return l.status().Ready })
	for kind, path := range map[string]string{"binary": l.dir + "/bin/podlace-portmap", "conflist": l.dir + "/net.d/" + conflistName,
		"node": nodefile.Path} {
		kerneltest.Must(t, os.Remove(path))
		l.await(path+" is back", func() bool { _, err := os.Stat(path); return err == nil })
		l.await("the log and the metric name "+kind, func() bool {
			return counterValue(t, a, "podlace_node_changes_total", kind, "look") == 1 && l.log.count("cause=look") > 0
		})
	}
	if l.log.count("files="+l.dir+"/bin/podlace-portmap cause=look") != 1 ||
		l.log.count("file="+l.dir+"/net.d/"+conflistName+" cause=look") != 1 {
		t.Error("the log does not name the files")
	}
}

func counterValue(t *testing.T, a *agent, name, kind, cause string) float64 {
	t.Helper()
	families, err := a.metrics.registry.Gather()
	kerneltest.Must(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if l := m.GetLabel(); f.GetName() == name && l[0].GetValue() == cause && l[1].GetValue() == kind {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

// TestRetry: a failed change is retried until it succeeds, first after 1 s, then with growing delays of at most 5 minutes, which events do
// not prolong.
func TestRetry(t *testing.T) {
	l := newLab(t)
	free := l.blockNexthop("n2")
	a := l.quietAgent()
	began := time.Now()
	a.step(map[cause]bool{onStart: true})
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300} {
		if a.retry != want*time.Second || a.retryAt.Before(began.Add(a.retry)) || a.peers[0].State != noderoutes.Failed {
			t.Errorf("failure %d: the next try after %v, want %d s", i+1, a.retry, want)
		}
		at := time.Now().Add(mostRetry) // a busy machine may need longer for a step than the first delays last
		a.retryAt = at
		a.step(map[cause]bool{onKernel: true})
		if a.retryAt != at {
			t.Errorf("failure %d: an event moved the next try by %v", i+1, a.retryAt.Sub(at))
		}
		began = time.Now()
		a.retryAt = began // simulates that the time has come
		a.step(map[cause]bool{onLook: true})
	}
	free()
	a.retryAt = time.Now()
	a.step(map[cause]bool{onLook: true})
	if !slices.Equal(l.routes(), full(2, 3)) || !a.retryAt.IsZero() || a.retry != 0 {
		t.Errorf("%q, the next try at %v", l.routes(), a.retryAt)
	}
}

// TestNoWallClock: no decision depends on the wall clock, because it can jump. The agent compares its own times by the monotonic clock, so
// its code must not call methods that strip that. Creation times of nodes are compared only with each other.
func TestNoWallClock(t *testing.T) {
	strips := []string{"Unix", "UnixMilli", "UnixMicro", "UnixNano", "Round", "Truncate", "Local", "In", "AddDate", "Date", "Parse", "UTC"}
	calls := 0
	for _, dir := range []string{".", "../noderoutes", "../../nodefile"} {
		paths, err := filepath.Glob(dir + "/*.go")
		kerneltest.Must(t, err)
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, path, nil, 0)
			kerneltest.Must(t, err)
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				f, ok := call.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				calls++
				if f.Sel.Name == "Format" { // for the status that an administrator reads
					return false
				}
				if pkg, _ := f.X.(*ast.Ident); slices.Contains(strips, f.Sel.Name) && (pkg == nil || !slices.Contains([]string{"url"}, pkg.Name)) {
					t.Errorf("%s: %s: a time without the monotonic clock", fset.Position(call.Pos()), f.Sel.Name)
				}
				return true
			})
		}
	}
	if calls < 100 {
		t.Errorf("only %d calls were seen", calls)
	}
}

// TestWrongClocks uses nodes and files with times far in the past or future. A node's time may only decide which of two is older.
func TestWrongClocks(t *testing.T) {
	l := newLab(t)
	for i, created := range map[int]time.Time{2: time.Unix(-1e9, 0), 3: time.Date(2262, 1, 1, 0, 0, 0, 0, time.UTC), 4: {}} {
		n := l.peer(i)
		n.CreationTimestamp.Time = created
		l.api.put(n)
	}
	thief := nodeObject("n8", []string{"10.244.3.0/24"}, []string{"192.0.2.8"}) // older than n3, because its clock was wrong
	l.api.put(thief)
	for i, name := range []string{"plugins/bridge", "plugins/portmap", "config/config.json", "config/" + conflistName} {
		at := time.Unix(int64(i%2)*8e9, 0)
		kerneltest.Must(t, os.Chtimes(filepath.Join(l.dir, name), at, at))
	}
	l.ready()
	want := append(full(2, 4), "10.244.3.0/24 192.0.2.8", "fd00:10:244:3::/64 2001:db8::3")
	slices.Sort(want)
	l.has(want)
	l.put("plugins/bridge", strings.Repeat("bridgf", 100_000)) // same size as the installed file, but older
	kerneltest.Must(t, os.Chtimes(l.dir+"/plugins/bridge", time.Unix(0, 0), time.Unix(0, 0)))
	kerneltest.Must(t, os.Chtimes(l.dir+"/bin/podlace-bridge", time.Unix(8e9, 0), time.Unix(8e9, 0)))
	l.await("the other plugin", func() bool { return l.read("bin/podlace-bridge") == l.read("plugins/bridge") })
	if _, err := os.Stat(nodefile.Path); errors.Is(err, os.ErrNotExist) || l.state("n8") != string(noderoutes.Direct) {
		t.Errorf("%v, n8 %q", err, l.state("n8"))
	}
}
