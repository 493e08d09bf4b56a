// SPDX-License-Identifier: Apache-2.0

// Package kerneltest is for tests that change the kernel: it runs a package's
// tests in a sandbox, makes pods for them and checks that nothing is left.
package kerneltest

import (
	"crypto/rand"
	"errors"
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

	"github.com/podlace/podlace/pkg/sandbox"
)

// Main is what TestMain of a package calls whose tests change the kernel. The
// tests run in namespaces of their own, and the process ends with their exit
// code; in a virtual machine with a card for the tests they have the machine.
// Where namespaces cannot be had, the package is skipped loudly, or
// fails with KERNELTEST=require in the environment, or full.
//
// A process that tests start from their own binary comes through TestMain too:
// it has to turn off before Main, or gets a sandbox of its own.
func Main(m *testing.M) {
	if slices.ContainsFunc(os.Args, fuzzWorker) {
		os.Exit(m.Run()) // in the sandbox already, and talking over inherited pipes
	}
	if onMachine() {
		if err := os.MkdirAll("/run/netns", 0o755); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	inside, code, err := sandbox.Enter()
	if err != nil {
		os.Exit(unavailable(os.Stdout, err, os.Getenv("KERNELTEST") == "require" || full()))
	}
	if inside {
		code = m.Run()
	}
	os.Exit(code)
}

// full is for a kernel that has every feature that the tests know of.
func full() bool { return os.Getenv("KERNELTEST") == "full" }

// Feature passes on whether the kernel has a feature that it can lack, which a
// test judges by, and says what it lacks. With KERNELTEST=full that is a
// failure.
func Feature(t testing.TB, has bool, name string) bool {
	t.Helper()
	if !has && full() {
		t.Fatalf("KERNELTEST=full, and this kernel has no %s", name)
	}
	if !has {
		t.Logf("this kernel has no %s: only what is done without it is tested", name)
	}
	return has
}

func fuzzWorker(arg string) bool {
	return strings.HasPrefix(strings.TrimLeft(arg, "-"), "test.fuzzworker")
}

// unavailable reports the skip in the form of a test, so that what reads the
// output of tests (go test -json, -v) counts it.
func unavailable(w io.Writer, err error, required bool) int {
	verdict, end, code := "SKIP", "PASS", 0
	if required {
		verdict, end, code = "FAIL", "FAIL", 1
	}
	fmt.Fprintf(w, "=== RUN   KernelTests\n--- %s: KernelTests (0.00s)\n", verdict)
	fmt.Fprintf(w, "    %s 1 package, which needs namespaces: %v\n%s\n", verdict, err, end)
	return code
}

// Random draws the same numbers in every run, so that a test fails by a change and not by chance; PODLACE_SEED draws others. The log of a
// failed test names the seed.
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

// NewPod makes a pod with a name of its own, closed at the end of the test.
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

// podName is unique and tells the test.
func podName(test string) string {
	name := regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(test, "-")
	return name[:min(len(name), 40)] + "-" + strings.ToLower(rand.Text()[:8])
}

// Clean takes a snapshot of the host, the pods and the state folders, and at
// the end of the test reports each difference as an error. It comes after the
// pods and before everything whose cleanup it shall see.
func Clean(t testing.TB, pods ...*sandbox.Pod) {
	t.Helper()
	opt := sandbox.Options{Pods: pods, Dirs: []string{"/run/podlace", "/var/lib/cni"}, Ignore: leftOnPurpose()}
	before, err := sandbox.Take(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { NoLeak(t, before, opt) })
}

// leftOnPurpose matches the files of the state folders which stay: locks, the
// folders of networks, and where the next search for a free address begins.
func leftOnPurpose() *regexp.Regexp {
	return regexp.MustCompile(`^host: (file .*/(lock|.*\.lock|\.(masqueraded|no-fq_codel|(gateway|made|mtu|bridge|found)-[^/]+)|last_reserved_ip\.\d+|\.podlace/[^/]+/(mark|released))|folder /run/podlace/(\.localhost/)?[^/]+|folder /var/lib/cni/networks(/[^/]+){0,2})$`)
}

// StateDirs are where records and leases are.
func StateDirs() []string { return []string{"/run/podlace", "/var/lib/cni/networks"} }

// Age lets what was recorded in the folders in the last half minute look as if it were made a minute ago. GC spares what was made just now.
func Age(dirs ...string) error {
	then := time.Now().Add(-time.Minute)
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

// NoLeak takes a snapshot with opt and reports each difference to before as an
// error. The kernel tears namespaces down in its own time, so differences get
// ten seconds to go.
func NoLeak(t testing.TB, before *sandbox.Snapshot, opt sandbox.Options) {
	t.Helper()
	var diff []string
	for wait := 5 * time.Millisecond; wait < 6*time.Second; wait *= 2 {
		after, err := sandbox.Take(opt)
		if err != nil {
			t.Error(err)
			return
		}
		if diff = sandbox.Diff(before, after); len(diff) == 0 {
			return
		}
		time.Sleep(wait)
	}
	for _, line := range diff {
		t.Errorf("leak: %s", line)
	}
}

// ForgePair makes a pair of links of a kind, veth or netkit, with names and indexes of the caller's choice, both in the namespace that the
// caller is in, as a tenant with CAP_NET_ADMIN there may.
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

// Flood sends frames of 1,134 bytes by a link of the namespace that the caller is in, and does not care for those that are dropped.
func Flood(name string, frames int) error {
	// Ethernet type 0x88b5 is for local experiments (IEEE 802).
	return Send(name, append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), make([]byte, 1120)...), frames)
}

// Send sends copies of a frame by a link of the namespace that the caller is in, and ignores the frames that a full queue drops.
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
