// SPDX-License-Identifier: Apache-2.0

// Package kerneltest runs tests that change the kernel in a sandbox, creates pods for them, and checks for leaks.
package kerneltest

import (
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Main runs a package's tests in new namespaces and exits with their exit code. TestMain calls it in each package whose tests change the
// kernel. They run in several sandboxes at once, so they must not depend on each other, or in a virtual machine with a NIC for tests in its
// own namespaces. If the machine does not allow new namespaces, Main skips the package and prints the reason, or fails with
// KERNELTEST=require or full.
func Main(m *testing.M) {
	if slices.ContainsFunc(os.Args, fuzzWorker) {
		os.Exit(m.Run()) // already in the sandbox, connected by inherited pipes
	}
	if onMachine() {
		if err := os.MkdirAll("/run/netns", 0o755); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	flag.Parse()
	if flagValue("list") != "" {
		os.Exit(m.Run())
	}
	if os.Getenv(partEnv) == "" {
		if names := selected(); len(names) > 1 {
			os.Exit(runParts(names))
		}
	}
	os.Exit(runInside(m))
}

// runInside runs the tests in one sandbox.
func runInside(m *testing.M) int {
	part := os.Getenv(partEnv) == onePart
	if !part { // the same process inside the sandbox must not distribute the tests
		os.Setenv(partEnv, "all")
	}
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil:
		code = reportUnavailable(os.Stdout, err, os.Getenv("KERNELTEST") == "require" || requireFeatures())
		if part {
			code += unavailable
		}
	case inside:
		os.Unsetenv(partEnv)
		code = m.Run()
	}
	return code
}

// requireFeatures reports whether a missing kernel feature fails the tests (KERNELTEST=full).
func requireFeatures() bool { return os.Getenv("KERNELTEST") == "full" }

// Feature returns whether the kernel has a feature, as the caller has found out. If not, Feature logs its name and, with KERNELTEST=full,
// fails the test.
func Feature(t testing.TB, has bool, name string) bool {
	t.Helper()
	if !has && requireFeatures() {
		t.Fatalf("KERNELTEST=full, and this kernel has no %s", name)
	}
	if !has {
		t.Logf("this kernel has no %s: only what is done without it is tested", name)
	}
	return has
}

// Slow skips a test in `make quick`.
func Slow(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("SKIPPED by -short: make test runs it")
	}
}

func fuzzWorker(arg string) bool {
	return strings.HasPrefix(strings.TrimLeft(arg, "-"), "test.fuzzworker")
}

// reportUnavailable prints a skipped or failed test in the format of "go test", so that tools count it.
func reportUnavailable(w io.Writer, err error, required bool) int {
	verdict, end, code := "SKIP", "PASS", 0
	if required {
		verdict, end, code = "FAIL", "FAIL", 1
	}
	fmt.Fprintf(w, "=== RUN   KernelTests\n--- %s: KernelTests (0.00s)\n", verdict)
	fmt.Fprintf(w, "    %s 1 package, which needs namespaces: %v\n%s\n", verdict, err, end)
	return code
}

// Random returns a generator with a fixed seed, or that of PODLACE_SEED, so that every run uses the same numbers. A failed test logs the
// seed.
func Random(t testing.TB) *mathrand.Rand {
	t.Helper()
	seed := uint64(1)
	if given := os.Getenv("PODLACE_SEED"); given != "" {
		if _, err := fmt.Sscan(given, &seed); err != nil {
			t.Fatalf("PODLACE_SEED=%s: %v", given, err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("PODLACE_SEED=%d draws the same", seed)
		}
	})
	return mathrand.New(mathrand.NewPCG(seed, 0))
}

// NewPod creates a pod with a unique name, and deletes the pod when the test ends.
func NewPod(t testing.TB) *sandbox.Pod {
	t.Helper()
	pod, err := sandbox.NewPod(podName(t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pod.Close(); err != nil {
			t.Error(err)
		}
	})
	return pod
}

// podName returns a unique name that contains the test's name.
func podName(test string) string {
	name := regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(test, "-")
	return name[:min(len(name), 40)] + "-" + strings.ToLower(rand.Text()[:8])
}

// Clean takes a snapshot of the host, the pods and the folders of plugins' state, and reports how the end of the test differs. Call it
// after creating the pods and before making changes.
func Clean(t testing.TB, pods ...*sandbox.Pod) {
	t.Helper()
	opt := snapshot.Options{Pods: pods, Dirs: []string{"/run/podlace", "/var/lib/cni"}, Ignore: leftOnPurpose()}
	before, err := snapshot.Take(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { NoLeak(t, before, opt) })
}

// leftOnPurpose matches what plugins keep forever: locks, network folders, and the files with the last assigned address.
func leftOnPurpose() *regexp.Regexp {
	return regexp.MustCompile(`^host: (file .*/(lock|.*\.lock|\.(iptables|masqueraded|(gateway|bridge|logged-found)-[^/]+)|last_reserved_ip\.\d+|podlace_boot)|folder /run/podlace/(\.localhost/)?[^/]+|folder /var/lib/cni/networks(/[^/]+){0,2})$`)
}

// StateDirs returns the folders in which plugins store records of attachments and leases of addresses.
func StateDirs() []string { return []string{"/run/podlace", "/var/lib/cni/networks"} }

// Age makes recent files in the folders a minute old, so that tests need not wait: GC keeps attachments whose files are less than a second
// old.
func Age(dirs ...string) error { return setTimes(time.Now().Add(-time.Minute), dirs) }

// KeepYoung gives recent files in the folders a time in the future, so that they stay young for GC, however slow the machine is.
func KeepYoung(dirs ...string) error { return setTimes(time.Now().Add(30*time.Minute), dirs) }

func setTimes(then time.Time, dirs []string) error {
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			if info, err := e.Info(); err == nil && time.Since(info.ModTime()) < 30*time.Second {
				return os.Chtimes(path, then, then)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// NoLeak reports how a new snapshot with opt differs from the earlier one. If they differ, it retries for up to ten seconds, because the
// kernel deletes namespaces asynchronously.
func NoLeak(t testing.TB, before *snapshot.Snapshot, opt snapshot.Options) {
	t.Helper()
	var diff []string
	for wait := 5 * time.Millisecond; wait < 6*time.Second; wait *= 2 {
		after, err := snapshot.Take(opt)
		if err != nil {
			t.Error(err)
			return
		}
		if diff = snapshot.Diff(before, after); len(diff) == 0 {
			return
		}
		time.Sleep(wait)
	}
	for _, line := range diff {
		t.Errorf("leak: %s", line)
	}
}

// ForgePair creates a pair of veth or netkit links with these names and indexes in the caller's namespace, as a pod with CAP_NET_ADMIN can.
func ForgePair(kind, name string, index int, peer string, peerIndex int) error {
	const peerInfo = 1 // VETH_INFO_PEER, IFLA_NETKIT_PEER_INFO
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	req.AddData(header)
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind))
	end := info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(peerInfo, nil)
	nl.NewIfInfomsgChild(end, unix.AF_UNSPEC).Index = int32(peerIndex)
	end.AddRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(peer))
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// Flood sends broadcast frames of 1,134 bytes on a link of the caller's namespace. Dropped ones are no error.
func Flood(name string, frames int) error {
	// the Ethernet type 0x88b5 is reserved for local experiments (IEEE 802)
	return Send(name, append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), make([]byte, 1120)...), frames)
}

// Send sends copies of a frame on a link of the caller's namespace. Frames that a full transmit queue drops are no error.
func Send(name string, frame []byte, copies int) error {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for range copies {
		if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
	}
	return nil
}
