// SPDX-License-Identifier: Apache-2.0

package nodefile

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

var sameCIDR = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func cidrs(texts ...string) (list []netip.Prefix) {
	for _, s := range texts {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}

// putFile writes a file below the /run of the test's sandbox, and deletes it when the test ends.
func putFile(t *testing.T, path, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(path) })
}

func TestRead(t *testing.T) {
	for _, c := range []struct {
		name, content string
		want          Node
		err           string
	}{
		{"one family", `{"podCIDRs":["10.1.2.0/24"]}`, Node{PodCIDRs: cidrs("10.1.2.0/24")}, ""},
		{"all keys", `{"podCIDRs":["10.1.2.0/24","fd00:2::/64"],"clusterCIDRs":["10.0.0.0/8","fd00::/16"],"mtu":1450}`,
			Node{cidrs("10.1.2.0/24", "fd00:2::/64"), cidrs("10.0.0.0/8", "fd00::/16"), 1450}, ""},
		{"unknown keys", `{"podCIDRs":["10.1.2.0/24"],"routes":[1,{}],"MTUs":"x"}`, Node{PodCIDRs: cidrs("10.1.2.0/24")}, ""},
		{"null", `{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":null,"mtu":null}`, Node{PodCIDRs: cidrs("10.1.2.0/24")}, ""},
		{"no podCIDRs", `{"clusterCIDRs":["10.0.0.0/8"]}`, Node{}, `want {"podCIDRs": [`},
		{"a part", `{"podCIDRs":["10.1.2.0/24"],"clus`, Node{}, `want {"podCIDRs": [`},
		{"no CIDR", `{"podCIDRs":["10.1.2.0"]}`, Node{}, `podCIDRs: "10.1.2.0" is no CIDR`},
		{"cluster: no CIDR", `{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":["x"]}`, Node{}, `clusterCIDRs: "x" is no CIDR`},
		{"cluster: no list", `{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":"10.0.0.0/8"}`, Node{}, `clusterCIDRs: want a list such as`},
		{"cluster: host bits", `{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":["10.1.0.0/8"]}`, Node{}, `clusterCIDRs: 10.1.0.0/8: want a subnet`},
		{"cluster: mapped", `{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":["::ffff:10.0.0.0/104"]}`, Node{}, `want a subnet`},
		{"mtu: text", `{"podCIDRs":["10.1.2.0/24"],"mtu":"auto"}`, Node{}, `mtu "auto": want a number of bytes, 68 to 65535`},
		{"mtu: small", `{"podCIDRs":["10.1.2.0/24"],"mtu":67}`, Node{}, `mtu 67: want`},
		{"mtu: large", `{"podCIDRs":["10.1.2.0/24"],"mtu":65536}`, Node{}, `mtu 65536: want`},
		{"large file", strings.Repeat(" ", maxFile+1), Node{}, "larger than 65536 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			putFile(t, Path, c.content)
			putFile(t, FlannelPath, "FLANNEL_SUBNET=10.9.9.1/24") // applies only without the other file
			file, node, err := Read()
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), Path) {
					t.Errorf("%v, want %q", err, c.err)
				}
				return
			}
			if diff := cmp.Diff(c.want, node, sameCIDR); err != nil || file != Path || diff != "" {
				t.Errorf("%s %v\n%s", file, err, diff)
			}
		})
	}
}

func TestReadFlannel(t *testing.T) {
	putFile(t, FlannelPath, "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.3.1/24\nFLANNEL_IPV6_SUBNET=\"fd42:0:0:3::1/64\"\nFLANNEL_MTU=1450\n")
	file, node, err := Read()
	if diff := cmp.Diff(Node{PodCIDRs: cidrs("10.42.3.0/24", "fd42:0:0:3::/64")}, node, sameCIDR); err != nil || file != FlannelPath || diff != "" {
		t.Errorf("%s %v\n%s", file, err, diff)
	}
	if err := os.Remove(FlannelPath); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Read(); err == nil || !strings.Contains(err.Error(), "neither /run/podlace/node.json nor /run/flannel/subnet.env exists") {
		t.Error(err)
	}
}

// Read returns what Write wrote, unchanged content is not written again, and only root can read the file.
func TestWrite(t *testing.T) {
	t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(Path)) })
	if err := os.RemoveAll(filepath.Dir(Path)); err != nil {
		t.Fatal(err)
	}
	node := Node{cidrs("10.1.2.0/24", "fd00:2::/64"), cidrs("10.0.0.0/8"), 1450}
	for i, want := range []bool{true, false, false, true} {
		if i == 3 {
			node.MTU = 0
		}
		var before, after unix.Stat_t
		_ = unix.Lstat(Path, &before)
		changed, err := Write(node)
		if err := errors.Join(err, unix.Lstat(Path, &after)); err != nil || changed != want || (before.Ino != after.Ino) != want {
			t.Fatalf("write %d: changed %t, inode %d -> %d: %v", i, changed, before.Ino, after.Ino, err)
		}
		if after.Mode != unix.S_IFREG|0o600 {
			t.Errorf("mode %o", after.Mode)
		}
		if _, back, err := Read(); err != nil || !cmp.Equal(node, back, sameCIDR) {
			t.Fatalf("read %+v, %v", back, err)
		}
	}
}

// Write replaces a symlink, a FIFO or a damaged file at the path, and does not change the target of the symlink.
func TestWriteReplaces(t *testing.T) {
	target := filepath.Join(t.TempDir(), "target")
	putFile(t, target, "untouched")
	for what, place := range map[string]func() error{
		"symbolic link": func() error { return os.Symlink(target, Path) },
		"FIFO":          func() error { return unix.Mkfifo(Path, 0o600) },
		"damaged file":  func() error { return os.WriteFile(Path, []byte("{"), 0o600) },
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(Path), 0o700), Remove(), place()); err != nil {
			t.Fatal(err)
		}
		changed, err := Write(Node{PodCIDRs: cidrs("10.1.2.0/24")})
		if _, node, e := Read(); err != nil || e != nil || !changed || len(node.PodCIDRs) != 1 {
			t.Errorf("%s: %t %v, %v %v", what, changed, err, node, e)
		}
	}
	if data, err := os.ReadFile(target); err != nil || string(data) != "untouched" {
		t.Errorf("the target of the link has %q, %v", data, err)
	}
	if err := errors.Join(Remove(), Remove()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(Path); !os.IsNotExist(err) {
		t.Errorf("%v after Remove", err)
	}
}

func TestWriteRefuses(t *testing.T) {
	many := make([]netip.Prefix, MaxClusterCIDRs+1)
	for i := range many {
		many[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
	}
	own := cidrs("10.1.2.0/24")
	for want, node := range map[string]Node{
		"with at least one CIDR":         {},
		`clusterCIDRs: "" is no CIDR`:    {PodCIDRs: own, ClusterCIDRs: []netip.Prefix{{}}},
		"257 clusterCIDRs: want at most": {PodCIDRs: own, ClusterCIDRs: many},
		"mtu 67":                         {PodCIDRs: own, MTU: 67},
		"larger than 65536 bytes":        {PodCIDRs: slices.Repeat(own, 6000)},
	} {
		if changed, err := Write(node); err == nil || changed || !strings.Contains(err.Error(), want) {
			t.Errorf("%t %v, want %q", changed, err, want)
		}
	}
	if _, err := os.Lstat(Path); !os.IsNotExist(err) {
		t.Errorf("there is a file: %v", err)
	}
	if changed, err := Write(Node{PodCIDRs: own, ClusterCIDRs: many[1:]}); err != nil || !changed {
		t.Errorf("%d clusterCIDRs: %t %v", MaxClusterCIDRs, changed, err)
	}
	_ = Remove()
}

// FuzzParse checks that Parse and parseFlannel return podCIDRs or an error, and that parsed content survives encoding as JSON.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", `{"podCIDRs":["10.1.2.0/24","fd00::/64"]}`, `{"podCIDRs":}`, `{"podCIDRs":[null]}`, "FLANNEL_SUBNET=",
		`{"podCIDRs":["10.1.2.0/24"],"clusterCIDRs":["10.0.0.0/8"],"mtu":1450}`, `{"podCIDRs":["::/0"],"clusterCIDRs":[null],"mtu":1e9}`,
		"FLANNEL_SUBNET=\"10.1.2.1/24\"\r\nFLANNEL_IPV6_SUBNET=::1/64"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, read := range []func([]byte) (Node, error){Parse, parseFlannel} {
			node, err := read(data)
			if (err == nil) != (len(node.PodCIDRs) > 0) {
				t.Errorf("%q: %v, %v", data, node, err)
			}
			if err != nil {
				continue
			}
			for _, c := range append(node.PodCIDRs, node.ClusterCIDRs...) {
				if !c.IsValid() {
					t.Errorf("%q: %v", data, c)
				}
			}
			text, _ := json.Marshal(node)
			if back, err := Parse(text); err != nil || len(back.PodCIDRs) != len(node.PodCIDRs) ||
				len(back.ClusterCIDRs) != len(node.ClusterCIDRs) || back.MTU != node.MTU {
				t.Errorf("%q: %s came back as %v, %v", data, text, back, err)
			}
		}
	})
}
