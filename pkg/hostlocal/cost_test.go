// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// openCounts runs f(), counts with inotify(7) how often f() opens each file in the folder, and returns the counts.
func openCounts(t *testing.T, dir string, f func()) map[string]int {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	watch := os.NewFile(uintptr(fd), "inotify")
	defer watch.Close()
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	f()
	count, buf := map[string]int{}, make([]byte, 1<<20)
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EAGAIN {
			return count
		}
		if err != nil {
			t.Fatal(err)
		}
		for rest := buf[:n]; len(rest) > 0; {
			mask, length := binary.NativeEndian.Uint32(rest[4:]), binary.NativeEndian.Uint32(rest[12:])
			if mask&unix.IN_Q_OVERFLOW != 0 {
				t.Fatal("too many events: something opens every file again and again")
			}
			if name := string(bytes.TrimRight(rest[16:16+length], "\x00")); name != "" {
				count[name]++
			}
			rest = rest[16+length:]
		}
	}
}

// TestL04OpensNoOthersLease (L-04): in a folder with 10,000 leases, ADD, CHECK, DEL and STATUS must open only the leases of their own
// attachment. After another program has changed the folder, the next CNI command reads each lease once. Later CNI commands read only the
// leases of their own attachment.
func TestL04OpensNoOthersLease(t *testing.T) {
	kerneltest.Slow(t)
	const others = 10_000
	l := newQuickLab(t, `"ranges":[[{"subnet":"10.0.0.0/8"}],[{"subnet":"fd00::/64"}]]`)
	addr := netip.MustParseAddr("10.1.0.0")
	folder, err := openLeases(l.dir, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	for i := range others {
		if _, err := folder.createLease(addr, plugin.Attachment{ContainerID: fmt.Sprintf("%064d", i), IfName: "eth0"}); err != nil {
			t.Fatal(err)
		}
		addr = addr.Next()
	}
	folder.setLast(0, netip.MustParseAddr("10.1.0.50")) // between taken addresses
	folder.close()
	readAll := func(verb string, f func()) {
		t.Helper()
		count := openCounts(t, l.dir, f)
		for at, n := netip.MustParseAddr("10.1.0.0"), 0; n < others; at, n = at.Next(), n+1 {
			if count[at.String()] != 1 {
				t.Fatalf("%s after a foreign change opened %s %d times, want once", verb, at, count[at.String()])
			}
		}
	}
	readAll("ADD", func() { l.ok(l.call("ADD", "mine", "")) })
	own := sortedKeys(func() map[string]string {
		m := map[string]string{}
		for name := range l.namesLeft() {
			if data, err := os.ReadFile(l.dir + "/" + name); err != nil || bytes.HasPrefix(data, []byte("mine")) {
				m[name] = ""
			}
		}
		return m
	}())
	if len(own) != 2 {
		t.Fatalf("the attachment has %v", own)
	}
	for _, c := range []struct{ verb, id, more string }{
		{"CHECK", "mine", prev(own[0]+"/8", own[1]+"/64")}, {"STATUS", "", ""}, {"ADD", "mine", ""}, {"DEL", "mine", ""}, {"DEL", "mine", ""},
		{"DEL", "unknown", ""},
	} {
		for name := range openCounts(t, l.dir, func() { l.call(c.verb, c.id, c.more) }) {
			if name != lockFile && !slices.Contains(own, name) {
				t.Errorf("%s %s opened %s", c.verb, c.id, name)
			}
		}
	}
	for name := range openCounts(t, l.dir, func() { l.ok(l.call("ADD", "next", "")) }) {
		if a, err := netip.ParseAddr(name); err == nil && a.Is4() && a.Less(addr) {
			t.Errorf("ADD opened %s", name)
		}
	}
	l.put("10.9.9.9", "foreign\r\neth0")
	readAll("DEL", func() { l.ok(l.call("DEL", "unknown", "")) })
	for name := range openCounts(t, l.dir, func() { l.ok(l.call("DEL", "foreign", "")) }) {
		if name != lockFile && name != "10.9.9.9" {
			t.Errorf("the second verb after a foreign change opened %s", name)
		}
	}
}
