// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

var update = flag.Bool("update", false, "rewrite the golden output of the scripts")

// sequentialT makes testscript run scripts one after another, because the scripts share one host.
type sequentialT struct{ *testing.T }

func (sequentialT) Parallel()       {}
func (sequentialT) Verbose() bool   { return testing.Verbose() }
func (s sequentialT) Skip(a ...any) { s.T.Skip(append([]any{"SKIPPED:"}, a...)...) }

func (s sequentialT) FailNow() {
	s.Logf("if only the expected output is out of date, run: go test ./integration/plugins -run '^TestScripts$/^%s$' -update", path.Base(s.Name()))
	s.T.FailNow()
}

func (s sequentialT) Run(name string, f func(testscript.T)) {
	s.T.Run(name, func(t *testing.T) { f(sequentialT{t}) })
}

func TestScripts(t *testing.T) {
	testscript.RunT(sequentialT{t}, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       *update,
		RequireUniqueNames:  true,
		RequireExplicitExec: true,
		Setup:               setupScript,
		Condition:           evalCondition,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"pod": cmdPod, "unpod": cmdUnpod, "veths": cmdVeths, "cni": cmdCNI, "chain": cmdChain,
			"age": cmdAge, "snapshot": cmdSnapshot, "unchanged": cmdUnchanged, "state": cmdState,
			"sysctl": cmdSysctl, "serve": cmdServe, "dial": cmdDial, "ping": cmdPing, "frame": cmdFrame,
		},
	})
}

type scriptState struct {
	pods      map[string]*sandbox.Pod
	names     []string // of the pods, in order of creation
	snapshots map[string]*harness.Oracle
	servers   []io.Closer
	cacheDir  string // cache of libcni
}

type scriptKey struct{}

func setupScript(env *testscript.Env) error {
	s := &scriptState{
		pods: map[string]*sandbox.Pod{}, snapshots: map[string]*harness.Oracle{},
		cacheDir: env.WorkDir + "/.cache",
	}
	env.Values[scriptKey{}] = s
	env.Setenv("BIN", harness.BinDir())
	env.Defer(s.close)
	return os.MkdirAll(s.cacheDir, 0o755)
}

func (s *scriptState) close() {
	for _, c := range s.servers {
		_ = c.Close()
	}
	for _, p := range s.pods {
		_ = p.Close()
	}
	awaitQuiet()
}

// awaitQuiet waits until the kernel has removed the links of pods that ended without DEL, which the next script could otherwise see.
func awaitQuiet() { awaitVeths(0) }

// awaitVeths waits until the host has n veth interfaces, and reports whether the number was reached in time.
func awaitVeths(n int) bool {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		links, err := net.Interfaces()
		links = slices.DeleteFunc(links, func(l net.Interface) bool { return !strings.HasPrefix(l.Name, "veth") })
		if err != nil || len(links) == n {
			return err == nil
		}
	}
	return false
}

func scriptOf(ts *testscript.TestScript) *scriptState { return ts.Value(scriptKey{}).(*scriptState) }

// findPod finds a pod by its name; the name "host" means the host.
func (s *scriptState) findPod(ts *testscript.TestScript, name string) *sandbox.Pod {
	p, ok := s.pods[name]
	if !ok && name != "host" {
		ts.Fatalf("there is no pod %s", name)
	}
	return p
}

// evalCondition evaluates [has:NAME] for a plugin under test, [sysctl:NAME] for an existing kernel parameter, [kernel:NAME] for a kernel
// feature, and [form:NAME] for a chain's first plugin.
func evalCondition(cond string) (bool, error) {
	kind, name, _ := strings.Cut(cond, ":")
	switch kind {
	case "has":
		return harness.Present(harness.BinDir(), name), nil
	case "sysctl":
		_, err := os.Stat("/proc/sys/" + name)
		return err == nil, nil
	case "kernel":
		return kernelHas(name)
	case "form":
		return harness.ChainPlugins()[0] == name, nil
	}
	return false, fmt.Errorf("unknown condition %q", cond)
}

func kernelHas(feature string) (bool, error) {
	if feature != "vlan_filtering" {
		return false, fmt.Errorf("unknown feature %q", feature)
	}
	host, err := kernel.Host()
	if err != nil {
		return false, err
	}
	defer host.Close()
	has, err := host.HasVLANFiltering()
	if err == nil && !has && os.Getenv("KERNELTEST") == "full" {
		err = fmt.Errorf("KERNELTEST=full, and this kernel has no %s", feature)
	}
	return has, err
}

// checkUsage ends a script if the number of a command's arguments is wrong.
func checkUsage(ts *testscript.TestScript, ok bool, text string) {
	if !ok {
		ts.Fatalf("usage: %s", text)
	}
}

// checkExpected checks the error of a command: a command with "!" must fail, and any other command must succeed.
func checkExpected(ts *testscript.TestScript, neg bool, err error, what string, args ...any) {
	switch {
	case neg && err == nil:
		ts.Fatalf("%s: unexpected success", fmt.Sprintf(what, args...))
	case !neg && err != nil:
		ts.Fatalf("%s: %v", fmt.Sprintf(what, args...), err)
	}
}

// pod NAME...
func cmdPod(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) > 0, "pod NAME...")
	s := scriptOf(ts)
	for _, name := range args {
		p, err := sandbox.NewPod(name)
		ts.Check(err)
		s.pods[name] = p
		s.names = append(s.names, name)
	}
}

// The command "veths N" waits until the host has N veths, which the kernel removes some time after their namespace.
func cmdVeths(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 1, "veths N")
	n, err := strconv.Atoi(args[0])
	ts.Check(err)
	if !awaitVeths(n) {
		ts.Fatalf("the host does not have %d veths", n)
	}
}

// The command "unpod NAME..." deletes the namespaces of pods without DEL, as a crash of the node does.
func cmdUnpod(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) > 0, "unpod NAME...")
	for _, name := range args {
		ts.Check(scriptOf(ts).findPod(ts, name).Close())
	}
}

// The command "age" makes all records look old, so that GC can collect them.
func cmdAge(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 0, "age")
	ts.Check(kerneltest.Age(harness.StateDirs()...))
}

// snapshot NAME
func cmdSnapshot(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 1, "snapshot NAME")
	s := scriptOf(ts)
	var pods []*sandbox.Pod
	for _, name := range s.names {
		pods = append(pods, s.pods[name])
	}
	o, err := harness.NewOracle(pods...)
	ts.Check(err)
	s.snapshots[args[0]] = o
}

// The command "unchanged NAME" checks that the state equals the snapshot of this name.
func cmdUnchanged(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) == 1, "[!] unchanged SNAPSHOT")
	o, ok := scriptOf(ts).snapshots[args[0]]
	if !ok {
		ts.Fatalf("there is no snapshot %s", args[0])
	}
	look := o.Leaks
	if neg {
		look = o.Diff
	}
	leaks, err := look()
	ts.Check(err)
	if len(leaks) > 0 {
		err = fmt.Errorf("%d differences:\n%s", len(leaks), strings.Join(leaks, "\n"))
	}
	checkExpected(ts, neg, err, "unchanged %s", args[0])
}

// The command "state POD|host" prints the state, one object per line. A later command "stdout" can check this output.
func cmdState(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 1, "state POD|host")
	var shot *snapshot.Snapshot
	ts.Check(harness.Enter(scriptOf(ts).findPod(ts, args[0]), func() (err error) {
		shot, err = snapshot.Take(snapshot.Options{})
		return err
	}))
	_, err := io.WriteString(ts.Stdout(), shot.String())
	ts.Check(err)
}

// The command "sysctl NAME VALUE" sets a kernel parameter of the host until the script ends.
func cmdSysctl(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 2, "sysctl NAME VALUE")
	file := "/proc/sys/" + args[0]
	old, err := os.ReadFile(file)
	ts.Check(err)
	ts.Check(os.WriteFile(file, []byte(args[1]), 0o644))
	ts.Defer(func() { _ = os.WriteFile(file, old, 0o644) })
}

// The command "serve POD PORT" starts a TCP server in a pod that answers with the pod's name.
func cmdServe(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, !neg && len(args) == 2, "serve POD PORT")
	s := scriptOf(ts)
	var port int
	_, err := fmt.Sscan(args[1], &port)
	ts.Check(err)
	server, err := harness.Serve(s.findPod(ts, args[0]), port)
	ts.Check(err)
	s.servers = append(s.servers, server)
}

// The command "dial FROM ADDRESS:PORT POD" checks that this pod answers at the address.
func cmdDial(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, neg && len(args) == 2 || !neg && len(args) == 3, "dial FROM ADDRESS:PORT POD, ! dial FROM ADDRESS:PORT")
	got, err := harness.Dial(scriptOf(ts).findPod(ts, args[0]), args[1], harness.Patience(neg))
	checkExpected(ts, neg, err, "dial %s", args)
	if !neg && got != args[2] {
		ts.Fatalf("dial %s: %q answered", args, got)
	}
}

// ping FROM ADDRESS
func cmdPing(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) == 2, "[!] ping FROM ADDRESS")
	err := harness.Ping(scriptOf(ts).findPod(ts, args[0]), args[1], harness.Patience(neg))
	checkExpected(ts, neg, err, "ping %s", args)
}

// The command "frame FROM TO" checks that an Ethernet broadcast on eth0 reaches the pod TO.
func cmdFrame(ts *testscript.TestScript, neg bool, args []string) {
	checkUsage(ts, len(args) == 2, "[!] frame FROM TO")
	s := scriptOf(ts)
	err := harness.SendFrame(s.findPod(ts, args[0]), s.findPod(ts, args[1]), "eth0", harness.Patience(neg))
	checkExpected(ts, neg, err, "frame %s", args)
}
