// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// parsed calls Parse with this value of the key "ipam", after which config may have more keys.
func parsed(config string, args map[string]string) (Config, error) {
	return Parse(&plugin.Request{Network: "net", CNIVersion: "1.1.0", Args: args, Config: []byte(config),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
}

// texts formats the range sets of a configuration.
func (c Config) texts() (sets []string) {
	for _, s := range c.Sets {
		sets = append(sets, s.String())
	}
	return sets
}

func TestSourcesOfRanges(t *testing.T) {
	c, err := parsed(`{"ipam":{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.9","ranges":[[{"subnet":"10.2.0.0/30"},{"subnet":"10.3.0.0/30"}],
		[{"subnet":"fd00::/126"}]]},"runtimeConfig":{"ipRanges":[[{"subnet":"10.4.0.0/30"}]]}}`, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"10.4.0.1-10.4.0.2", "10.1.0.9-10.1.0.254", "10.2.0.1-10.2.0.2,10.3.0.1-10.3.0.2", "fd00::1-fd00::3"}
	if diff := cmp.Diff(want, c.texts()); diff != "" {
		t.Error(diff)
	}
	if c.Dir != "/var/lib/cni/networks/net" {
		t.Errorf("folder %s", c.Dir)
	}
}

func TestParseRefused(t *testing.T) {
	const good = `"ranges":[[{"subnet":"10.1.0.0/24"}]]`
	for config, says := range map[string]string{
		`{"ipam":{}}`:              "no IP ranges specified",
		`{}`:                       "no IP ranges specified",
		`{"ipam":{"ranges":[[]]}}`: "ranges[0]: is empty",
		`{"ipam":{"ranges":[[{"subnet":"10.1.0.1/24"}]]}}`:                            "host bits",
		`{"ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"10.1.0.0/25"}]]}}`: "overlap",
		`{"ipam":{"ranges":[[{"subnet":"127.0.0.0/8"}]]}}`:                            "ipam subnet 127.0.0.0/8: has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"224.0.0.0/8"}]]}}`:                            "has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"ff00::/8"}]]}}`:                               "has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"127.9.0.0/24"}]]}}`:                           "ipam subnet 127.9.0.0/24: has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"::1/128"}]]}}`:                                "ipam subnet ::1/128: has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"::/0"}]]}}`:                                   "ipam subnet ::/0: has no addresses for pods",
		`{"ipam":{"ranges":[[{"subnet":"0.0.0.0/0"}]]}}`:                              "has no addresses for pods",
		`{"ipam":{` + good + `,"dataDir":"relative"}}`:                                `dataDir "relative": want an absolute path`,
		`{"ipam":{` + good + `,"routes":[{}]}}`:                                       "an entry has no dst",
		`{"ipam":{` + good + `,"routes":[null]}}`:                                     "an entry has no dst",
		`{"ipam":{` + good + `},"runtimeConfig":{"ips":["x"]}}`:                       `requested address "x": want an IP address`,
		`{"ipam":{` + good + `},"args":{"cni":{"ips":["10.1.0.300"]}}}`:               "want an IP address",
		`{"ipam":{` + good + `},"args":{"cni":{"ips":["fe80::1%lo"]}}}`:               "want an IP address",
		`{"ipam":{` + good + `,"resolvConf":"/nonexistent"}}`:                         "resolvConf",
		`{"ipam":{` + good + `,"resolvConf":"/dev"}}`:                                 "want a regular file",
	} {
		if _, err := parsed(config, nil); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", config, err, says)
		}
	}
	if _, err := parsed(`{"ipam":{`+good+`}}`, map[string]string{"IP": "nonsense"}); plugin.Code(err) != plugin.CodeConfig {
		t.Errorf("CNI_ARGS: %v", err)
	}
	for _, config := range []string{`{"ipam":[]}`, `{"ipam":{"ranges":{}}}`, `{"ipam":{"subnet":7}}`} {
		if _, err := parsed(config, nil); plugin.Code(err) != plugin.CodeDecode {
			t.Errorf("%s: %v", config, err)
		}
	}
}

// Before CNI version 0.3.0, a pod gets at most one address of each family.
func TestAddressesPerFamily(t *testing.T) {
	a, b := RangeSet{rangeIn(t, "10.1.0.0/24", "", "")}, RangeSet{rangeIn(t, "10.2.0.0/24", "", "")}
	six := RangeSet{rangeIn(t, "fd00::/64", "", "")}
	for _, v := range []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		old := v < "0.3.0"
		if err := checkPerFamily(v, []RangeSet{a, b}); (err != nil) != old ||
			old && err.Error() != "CNI version "+v+" does not support more than 1 address per family" {
			t.Errorf("%s: %v", v, err)
		}
		if err := checkPerFamily(v, []RangeSet{a, six}); err != nil {
			t.Errorf("%s: %v", v, err)
		}
	}
}

// Requested addresses take precedence in the order runtimeConfig, args, CNI_ARGS; their prefix lengths are ignored.
func TestRequests(t *testing.T) {
	c, err := parsed(`{"ipam":{"ranges":[[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]]},"runtimeConfig":{"ips":["10.1.0.5/16","fd00::5"]},
		"args":{"cni":{"ips":["::ffff:10.1.0.6"]}}}`, map[string]string{"IP": "10.1.0.7/24"})
	if err != nil {
		t.Fatal(err)
	}
	want := []request{{netip.MustParseAddr("10.1.0.5"), 0}, {netip.MustParseAddr("fd00::5"), 0}, {netip.MustParseAddr("10.1.0.6"), 1},
		{netip.MustParseAddr("10.1.0.7"), 2}}
	if diff := cmp.Diff(want, c.requests, cmp.Comparer(func(a, b request) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

func TestPick(t *testing.T) {
	set := RangeSet{rangeIn(t, "10.1.0.0/24", "", "")}
	for _, c := range []struct {
		requests, want, rest string // address@rank
	}{
		{"", "", ""},
		{"10.2.0.5@0", "", "10.2.0.5@0"},
		{"10.1.0.5@0", "10.1.0.5", ""},
		{"10.1.0.5@0 10.1.0.6@1 10.1.0.7@2", "10.1.0.5", ""},
		{"10.2.0.5@0 10.1.0.6@1 10.1.0.7@2", "10.1.0.6", "10.2.0.5@0"},
		{"10.1.0.5@1 10.1.0.6@1", "10.1.0.5", "10.1.0.6@1"},
		{"10.1.0.5@0 10.2.0.6@2", "10.1.0.5", "10.2.0.6@2"},
	} {
		wanted, rest := pickRequest(set, requestsOf(c.requests))
		got := ""
		if wanted.IsValid() {
			got = wanted.String()
		}
		if diff := cmp.Diff(requestsOf(c.rest), rest, cmp.Comparer(func(a, b request) bool { return a == b })); got != c.want || diff != "" {
			t.Errorf("%s: %s, want %s\n%s", c.requests, got, c.want, diff)
		}
	}
}

func requestsOf(text string) (out []request) {
	for _, word := range strings.Fields(text) {
		addr, rank, _ := strings.Cut(word, "@")
		out = append(out, request{netip.MustParseAddr(addr), int(rank[0] - '0')})
	}
	return out
}

func TestParseResolvConf(t *testing.T) {
	got := parseResolvConf("# comment\n; comment\n\n nameserver 192.0.2.1  \nnameserver 2001:db8::1 # x\nnameserver\ndomain a.example\n" +
		"domain example.com\nsearch one.example two.example\nsearch three.example\noptions ndots:5 timeout:3\noptions debug\nsortlist 1\nNAMESERVER 9.9.9.9")
	want := types.DNS{Nameservers: []string{"192.0.2.1", "2001:db8::1"}, Domain: "example.com",
		Search: []string{"one.example", "two.example", "three.example"}, Options: []string{"ndots:5", "timeout:3", "debug"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(types.DNS{}, parseResolvConf("")); diff != "" {
		t.Error(diff)
	}
}

func TestReadResolvConf(t *testing.T) {
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(file, []byte("nameserver 192.0.2.1\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if dns, err := readResolvConf(file); err != nil || len(dns.Nameservers) != 1 || dns.Nameservers[0] != "192.0.2.1" {
		t.Errorf("got %+v, %v", dns, err)
	}
	for _, path := range []string{fifo, dir, filepath.Join(dir, "missing"), "/dev/zero"} {
		if _, err := readResolvConf(path); plugin.Code(err) != plugin.CodeConfig {
			t.Errorf("%s: %v", path, err)
		}
	}
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	if _, err := readResolvConf(loop); err == nil || !strings.Contains(err.Error(), loop+": too many levels of symbolic links") {
		t.Error(err) // the file may be a symbolic link
	}
}
