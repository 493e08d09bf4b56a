// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

const tiny = `"subnet":"10.1.2.0/29"` // addresses .2 to .6

// TestUnchangedIsKnown: other programs change the leases of other attachments. The index must keep the entry of an attachment whose leases
// are unchanged. The index must also keep the entry if one of the attachment's own leases ends.
func TestUnchangedIsKnown(t *testing.T) {
	for ended := range 2 {
		l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/30"}],[{"subnet":"10.1.3.0/30"}]]`)
		pod := kerneltest.NewPod(t)
		l.ok(l.call("ADD", "dead", "", "CNI_NETNS="+pod.Path))
		l.put("10.1.4.9", "foreign\r\neth0")
		l.ok(l.call("DEL", "unknown", ""))
		if err := os.Remove(filepath.Join(l.dir, fmt.Sprintf("10.1.%d.2", 2+ended))); err != nil {
			t.Fatal(err)
		}
		l.ok(l.call("DEL", "unknown", ""))
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
		l.mustGive("a", "10.1.2.2/30 10.1.3.2/30")
	}
}

// TestForeignHands (F-44) checks that the CNI commands of this plugin succeed even if other programs change the lease folder before,
// between and after the commands.
func TestForeignHands(t *testing.T) {
	l := newLab(t, tiny)
	l.mustGive("a", "10.1.2.2/29")
	if err := os.Remove(filepath.Join(l.dir, "10.1.2.2")); err != nil { // the reference plugin's DEL does the same
		t.Fatal(err)
	}
	l.put("10.1.2.3", "b\r\neth0")
	l.mustGive("a", "10.1.2.4/29")
	l.ok(l.call("DEL", "b", ""))
	if l.files()["10.1.2.3"] != "" {
		t.Error("DEL did not see another program's lease")
	}
}

// TestIndexDamaged (F-05) checks that the results of all CNI commands are correct for any content of the index files.
func TestIndexDamaged(t *testing.T) {
	for _, junk := range []string{"", "{", "[]", `{"a/eth0":{"addresses":["10.1.2.99"]}}`, "\x00\xff"} {
		l := newLab(t, tiny)
		l.mustGive("a", "10.1.2.2/29")
		entries, err := os.ReadDir(indexPath(l.dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if err := os.WriteFile(filepath.Join(indexPath(l.dir), e.Name()), []byte(junk), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		l.mustFail(l.call("ADD", "a", ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
		l.ok(l.call("DEL", "a", ""))
		if l.files()["10.1.2.2"] != "" {
			t.Errorf("junk %q: DEL left the lease", junk)
		}
	}
}

// mustBeConsistent checks that the index is trusted. The file "mark" must have a bit for each existing shard, and no other bits.
func (l lab) mustBeConsistent() {
	l.Helper()
	held, err := openLeases(l.dir, slog.Default())
	if err != nil {
		l.Fatal(err)
	}
	defer held.close()
	if !held.index.isTrusted() {
		l.Error("the index is not trusted")
	}
	files, err := held.index.shardFiles()
	slices.Sort(files)
	if diff := cmp.Diff(files, held.index.expectedShards()); diff != "" || err != nil {
		l.Errorf("shards (-exist +in the mark): %v\n%s", err, diff)
	}
}

// TestLostShard (F-05): a shard (one file of the index) and the leases of its attachments are lost. The next CNI command must correct the
// file "mark".
func TestLostShard(t *testing.T) {
	l := newLab(t, tiny)
	l.mustGive("a", "10.1.2.2/29")
	shard := filepath.Join(indexPath(l.dir), shardName(plugin.Attachment{ContainerID: "a", IfName: "eth0"}))
	for _, path := range []string{shard, filepath.Join(l.dir, "10.1.2.2")} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	l.mustGive("b", "10.1.2.3/29")
	l.mustBeConsistent()
}

// TestForeignFilesBesideShards (F-44): other files have names that are similar to the names of shards. The plugin must still find each
// lease and must not remove the other files.
func TestForeignFilesBesideShards(t *testing.T) {
	foreign := []string{"400", "fff", "zzz", "0FF", "+ff"}
	for i := range 8 {
		l := newLab(t, tiny)
		var ids []string
		for _, name := range []string{"000", "3ff", "0ff"} { // names that would share a bit with other shards
			for n := 0; ; n++ {
				if id := fmt.Sprint("pod", n); shardName(plugin.Attachment{ContainerID: id, IfName: "eth0"}) == name {
					ids = append(ids, id)
					break
				}
			}
		}
		for n, id := range ids {
			l.mustGive(id, fmt.Sprintf("10.1.2.%d/29", n+2))
		}
		for _, name := range foreign {
			if err := os.WriteFile(filepath.Join(indexPath(l.dir), name), []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		l.put("10.1.2.6", "foreign\r\neth0") // so that the index is rebuilt
		l.mustFail(l.call("ADD", ids[i%3], ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
		l.mustBeConsistent()
		for _, id := range ids {
			l.ok(l.call("DEL", id, ""))
		}
		if diff := cmp.Diff([]string{"10.1.2.6"}, sortedKeys(l.leasesOf())); diff != "" {
			t.Errorf("left leases:\n%s", diff)
		}
		for _, name := range foreign {
			if _, err := os.Stat(filepath.Join(indexPath(l.dir), name)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestKnownLeasesAreNotRead (L-04) checks that ADD and DEL read only their own leases if the index is current. The test damages the lease
// files of other attachments. An ADD or DEL that reads a damaged lease file moves this file to another folder, so the test can detect the
// read.
func TestKnownLeasesAreNotRead(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.0.0/16"`)
	l.mustGive("a", "10.1.0.2/16")
	path := filepath.Join(l.dir, "10.1.0.2")
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file.Close() // does not change the folder's time
	l.mustGive("b", "10.1.0.3/16")
	l.ok(l.call("DEL", "b", ""))
	if _, err := os.Stat(path); err != nil {
		t.Error("the lease of another attachment was looked at")
	}
}

// TestAgainstModel runs random ADDs, DELs and changes by other programs. After each step, the leases must agree with a simple model that
// stores the owner of each address.
func TestAgainstModel(t *testing.T) {
	l := newLab(t, tiny)
	if err := os.MkdirAll(l.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	model := map[string]netip.Addr{}
	random := rand.New(rand.NewPCG(1, 2))
	for step := range 300 {
		id := fmt.Sprint("c", random.IntN(7))
		had, has := model[id]
		switch random.IntN(5) {
		case 0, 1:
			a := l.call("ADD", id, "")
			switch {
			case has:
				l.mustFail(a, plugin.CodeAddressTaken, had.String())
			case len(model) == 5:
				l.mustFail(a, plugin.CodeExhausted, "")
			case a.Code != 0:
				t.Fatalf("step %d: ADD %s: %+v", step, id, a)
			default:
				model[id] = netip.MustParsePrefix(a.addresses()).Addr()
			}
		case 2, 3:
			l.ok(l.call("DEL", id, ""))
			delete(model, id)
		case 4:
			if has {
				if err := os.Remove(filepath.Join(l.dir, had.String())); err != nil {
					t.Fatal(err)
				}
				delete(model, id)
			}
		}
		var want, got []string
		for id, addr := range model {
			want = append(want, addr.String()+" "+id)
		}
		for name, content := range l.files() {
			if _, err := netip.ParseAddr(name); err == nil {
				got = append(got, name+" "+strings.TrimSuffix(strings.TrimPrefix(content, `600 "`), `\r\neth0"`))
			}
		}
		slices.Sort(want)
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("step %d: %s", step, diff)
		}
	}
}

// BenchmarkLeases measures CNI commands in folders with different numbers of leases.
func BenchmarkLeases(b *testing.B) {
	for _, n := range []int{0, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			dir := filepath.Join(b.TempDir(), "net")
			l, err := openLeases(dir, slog.Default())
			if err != nil {
				b.Fatal(err)
			}
			set := RangeSet{{Subnet: netip.MustParsePrefix("10.0.0.0/8"), Start: netip.MustParseAddr("10.0.0.2"),
				End: netip.MustParseAddr("10.9.0.0")}}
			addr := set[0].Start
			for i := range n {
				if _, err := l.createLease(addr, plugin.Attachment{ContainerID: fmt.Sprintf("%064d", i), IfName: "eth0"}); err != nil {
					b.Fatal(err)
				}
				addr = addr.Next()
			}
			l.setLast(0, addr)
			l.close()
			for b.Loop() {
				l, err := openLeases(dir, slog.Default())
				if err != nil {
					b.Fatal(err)
				}
				r := &plugin.Request{ContainerID: "mine", IfName: "eth0", Log: slog.Default()}
				a := allocation{r: r, l: l, mine: entry{Attachment: r.Attachment(), Boot: l.index.boot}}
				if _, err := a.allocateAll(Config{Sets: []RangeSet{set}}); err != nil {
					b.Fatal(err)
				}
				if err := l.endEntry(a.mine); err != nil {
					b.Fatal(err)
				}
				if err := l.index.markCurrent(); err != nil {
					b.Fatal(err)
				}
				l.close()
			}
		})
	}
}

// TestTwoHolders (F-07): an admin removes the lock file, so that two processes hold a lock at the same time. When both processes have
// ended, the index must not be marked as current, regardless of which process ended first. The next CNI command must find the leases of
// both processes.
func TestTwoHolders(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}, {0}} { // in the last case, one process was killed
		l := newQuickLab(t, one)
		l.mustGive("first", "10.1.2.2/24")
		var both [2]*leases
		for i := range both {
			var err error
			if both[i], err = openLeases(l.dir, slog.Default()); err != nil {
				t.Fatal(err)
			}
			if i > 0 {
				continue
			}
			if err := os.Remove(filepath.Join(l.dir, lockFile)); err != nil {
				t.Fatal(err)
			}
		}
		for i, holder := range both {
			if ok, err := holder.createLease(netip.AddrFrom4([4]byte{10, 1, 2, byte(50 + i)}),
				plugin.Attachment{ContainerID: fmt.Sprint("pod", i), IfName: "eth0"}); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		for _, i := range order {
			both[i].markIndexCurrent()
		}
		both[0].close()
		both[1].close()
		for i := range both {
			l.ok(l.call("DEL", fmt.Sprint("pod", i), ""))
		}
		if diff := cmp.Diff([]string{"10.1.2.2"}, sortedKeys(l.leasesOf())); diff != "" {
			t.Errorf("order %v:\n%s", order, diff)
		}
	}
}
