// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// openCounts returns how often f opens each file in the folder.
func openCounts(t *testing.T, dir string, f func()) map[string]int {
	t.Helper()
	return eventCounts(t, dir, unix.IN_OPEN, f)
}

// eventCounts returns how often an event of inotify(7) occurs for each file in the folder during f.
func eventCounts(t *testing.T, dir string, event uint32, f func()) map[string]int {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	watch := os.NewFile(uintptr(fd), "inotify")
	defer watch.Close()
	if _, err := unix.InotifyAddWatch(fd, dir, event); err != nil {
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

// In a folder with 10,000 leases, CHECK, DEL and STATUS open only those of their own attachment, and ADD as many others as it may miss.
// Only a DEL that knows no address reads each lease, once (L-04).
func TestL04OpensNoOthersLease(t *testing.T) {
	kerneltest.Slow(t)
	const others = 10_000
	l := newQuickLab(t, `"ranges":[[{"subnet":"10.0.0.0/8"}],[{"subnet":"fd00::/64"}]]`)
	l.fillFolder(netip.MustParseAddr("10.1.0.0"), others)
	l.put("last_reserved_ip.0", "10.1.0.50") // between taken addresses
	opened := func(verb, id, more string) (n int) {
		t.Helper()
		for name := range openCounts(t, l.dir, func() { l.ok(l.call(verb, id, more)) }) {
			if data, err := os.ReadFile(l.dir + "/" + name); err == nil && bytes.HasPrefix(data, []byte("other")) {
				n++
			}
		}
		return n
	}
	if n := opened("ADD", "mine", ""); n != maxMisses {
		t.Errorf("ADD opened %d leases of others, want %d", n, maxMisses)
	}
	for _, c := range []struct{ verb, id, more string }{
		{"CHECK", "mine", prev("10.1.39.16/8", "fd00::2/64")}, {"STATUS", "", ""}, {"DEL", "mine", ""}, {"ADD", "mine", ""},
	} {
		if n := opened(c.verb, c.id, c.more); n != 0 {
			t.Errorf("%s opened %d leases of others", c.verb, n)
		}
	}
	if err := os.RemoveAll(filepath.Join(store.Root, l.network)); err != nil {
		t.Fatal(err)
	}
	if n := opened("DEL", "mine", prev("10.1.39.17/8", "fd00::3/64")); n != 0 {
		t.Errorf("DEL with prevResult opened %d leases of others", n)
	}
	if n := opened("DEL", "mine", ""); n != others {
		t.Errorf("DEL that knows no address opened %d leases of others, want %d", n, others)
	}
}

// fillFolder creates leases of other containers.
func (l lab) fillFolder(addr netip.Addr, n int) {
	l.Helper()
	folder, err := openLeases(makeFolder, l.dir, l.network, slog.Default(), attachment.Waiting)
	if err != nil {
		l.Fatal(err)
	}
	defer folder.close()
	for i := range n {
		if _, err := folder.createLease(addr, plugin.Attachment{ContainerID: fmt.Sprintf("other%059d", i), IfName: "eth0"}); err != nil {
			l.Fatal(err)
		}
		addr = addr.Next()
	}
}
