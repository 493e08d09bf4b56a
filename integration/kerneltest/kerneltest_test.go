// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestMain(m *testing.M) { Main(m) }

// rerun starts the test binary again in a child process. The child process creates its own sandbox.
func rerun(env []string, args ...string) (out string, code int) {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), env...)
	b, _ := cmd.CombinedOutput()
	return string(b), cmd.ProcessState.ExitCode()
}

// TestTimeout: a child process with a test that blocks prints one panic and ends after -test.timeout.
func TestTimeout(t *testing.T) {
	if os.Getenv("KERNELTEST_HELPER") != "" {
		time.Sleep(10 * time.Second)
		return
	}
	out, code := rerun([]string{"KERNELTEST_HELPER=1"}, "-test.run=^TestTimeout$", "-test.timeout=200ms")
	if code != 2 || strings.Count(out, "panic: test timed out after 200ms") != 1 {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}

func TestFlags(t *testing.T) {
	t.Run("run and v", func(t *testing.T) {
		out, code := rerun(nil, "-test.v", "-test.run=^TestPodName$")
		if code != 0 || strings.Count(out, "--- PASS: ") != 1 {
			t.Errorf("exit code %d:\n%s", code, out)
		}
	})
	t.Run("coverprofile", func(t *testing.T) {
		profile := filepath.Join(t.TempDir(), "cover.out")
		out, code := rerun(nil, "-test.run=^TestPodName$", "-test.coverprofile="+profile)
		if testing.CoverMode() == "" { // without coverage, the flag must have reached the inner run
			if code != 2 || !strings.Contains(out, "not built with coverage enabled") {
				t.Errorf("exit code %d:\n%s", code, out)
			}
			return
		}
		if text, err := os.ReadFile(profile); code != 0 || !strings.Contains(string(text), "kerneltest.go:") {
			t.Errorf("exit code %d, %v:\n%s", code, err, out)
		}
	})
	t.Run("fuzz worker", func(t *testing.T) {
		if !slices.ContainsFunc([]string{"x", "-test.fuzzworker"}, fuzzWorker) || fuzzWorker("-test.fuzz=.") {
			t.Error("fuzz workers are not distinguished from other processes")
		}
	})
}

// The sandbox cannot start with TMPDIR below /run, which it hides.
func TestWithoutSandbox(t *testing.T) {
	for _, c := range []struct {
		require, verdict string
		code             int
	}{{"", "SKIP", 0}, {"require", "FAIL", 1}} {
		out, code := rerun([]string{"TMPDIR=/run/lock", "KERNELTEST=" + c.require}, "-test.run=^TestPodName$")
		want := fmt.Sprintf("--- %s: KernelTests (0.00s)\n    %s 1 package, which needs namespaces: sandbox: the temporary folder /run/lock lies below /run", c.verdict, c.verdict)
		if code != c.code || !strings.Contains(out, want) || strings.Contains(out, "--- PASS") {
			t.Errorf("KERNELTEST=%s: exit code %d:\n%s", c.require, code, out)
		}
	}
}

func TestPodName(t *testing.T) {
	name := regexp.MustCompile(`^TestX-IPv6-ber-[a-z0-9]{8}$`)
	a, b := podName("TestX/IPv6_über"), podName("TestX/IPv6_über")
	if a == b || !name.MatchString(a) || !name.MatchString(b) {
		t.Errorf("got %s and %s, want two names that match %s", a, b, name)
	}
	if long := podName(strings.Repeat("x", 300)); !strings.HasPrefix(long, strings.Repeat("x", 40)+"-") || len(long) > 60 {
		t.Errorf("%s has %d bytes", long, len(long))
	}
}

// Runs have the same random numbers exactly if they have the same seed.
func TestRandom(t *testing.T) {
	t.Setenv("PODLACE_SEED", "")
	a, b := Random(t).Uint64(), Random(t).Uint64()
	t.Setenv("PODLACE_SEED", "2")
	if c := Random(t).Uint64(); a != b || a == c {
		t.Errorf("drew %d, %d, and with another seed %d", a, b, c)
	}
}

// A recorder is a testing.TB that records errors instead of failing the test.
type recorder struct {
	testing.TB
	errors   []string
	cleanups []func()
}

func (r *recorder) Helper()                   {}
func (r *recorder) Name() string              { return "recorded" }
func (r *recorder) Cleanup(f func())          { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Error(args ...any)         { r.errors = append(r.errors, fmt.Sprint(args...)) }
func (r *recorder) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (r *recorder) Errorf(f string, a ...any) { r.errors = append(r.errors, fmt.Sprintf(f, a...)) }

func (r *recorder) end() []string {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
	return r.errors
}

func TestCleanReports(t *testing.T) {
	r := &recorder{TB: t}
	pod := NewPod(r)
	Clean(r, pod)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "leaked"}}
	err := errors.Join(
		netlink.LinkAdd(bridge),
		pod.Do(func() error { return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "inpod"}}) }),
		os.MkdirAll("/run/podlace/net1", 0o755), os.WriteFile("/run/podlace/net1/key", nil, 0o600),
		os.WriteFile("/run/podlace/net1/lock", nil, 0o600),
		os.MkdirAll("/var/lib/cni/networks/net1", 0o755), os.WriteFile("/var/lib/cni/networks/net1/10.0.0.2", []byte("id"), 0o600),
		os.WriteFile("/var/lib/cni/networks/net1/last_reserved_ip.0", []byte("10.0.0.2"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = netlink.LinkDel(bridge)
		_ = os.RemoveAll("/run/podlace")
		_ = os.RemoveAll("/var/lib/cni")
	})
	want := []string{
		"leak: host: file /run/podlace/net1/key appeared",
		"leak: host: file /var/lib/cni/networks/net1/10.0.0.2 appeared",
		"leak: host: link leaked appeared",
		"leak: pod " + pod.Name + ": link inpod appeared",
	}
	if diff := cmp.Diff(want, r.end()); diff != "" {
		t.Errorf("reported (-want +got):\n%s", diff)
	}
}

// TestCleanWaits checks that Clean reports no leak if a new link disappears shortly after the end of the test.
func TestCleanWaits(t *testing.T) {
	r := &recorder{TB: t}
	Clean(r)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "slow"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		time.Sleep(300 * time.Millisecond)
		done <- netlink.LinkDel(bridge)
	}()
	if got := r.end(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestCleanSeesLaterCleanups(t *testing.T) {
	r := &recorder{TB: t}
	pod := NewPod(r)
	Clean(r, pod)
	later := NewPod(r)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "tidy"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	r.Cleanup(func() { _ = netlink.LinkDel(bridge) })
	if got := r.end(); len(got) > 0 {
		t.Errorf("reported %q", got)
	}
	for _, p := range []*sandbox.Pod{pod, later} {
		if _, err := os.Lstat(p.Path); err == nil {
			t.Errorf("pod %s was not closed", p.Name)
		}
	}
}
