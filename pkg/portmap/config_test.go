// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

func parsed(keys string) (Config, error) {
	return Parse(&plugin.Request{Network: "net", CNIVersion: "1.1.0", Config: []byte("{" + keys + "}"),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
}

// withMappings returns a configuration with these entries in the capability portMappings.
func withMappings(entries ...string) string {
	return `"runtimeConfig":{"portMappings":[` + strings.Join(entries, ",") + `]}`
}

func TestParse(t *testing.T) {
	plain := Config{Backend: "nftables", Unset: true, SNAT: true, iptablesRules: iptablesRules{MarkBit: 13}, MaxHostPorts: 1024}
	with := func(edit func(*Config)) Config {
		c := plain
		edit(&c)
		c.Unset = c.Unset && c.Backend == "nftables"
		return c
	}
	for keys, want := range map[string]Config{
		"":                           plain,
		`"backend":""`:               plain,
		`"backend":"nftables"`:       with(func(c *Config) { c.Unset = false }),
		`"backend":"iptables"`:       with(func(c *Config) { c.Backend = "iptables" }),
		`"snat":false`:               with(func(c *Config) { c.SNAT = false }),
		`"refuseHostListeners":true`: with(func(c *Config) { c.RefuseListeners = true }),
		`"maxHostPorts":10000`:       with(func(c *Config) { c.MaxHostPorts = 10000 }),
		`"snat":true,"masqAll":true`: with(func(c *Config) { c.MasqAll = true }),
		`"markMasqBit":5`:            with(func(c *Config) { c.Backend, c.MarkBit = "iptables", 5 }),
		`"markMasqBit":31`:           with(func(c *Config) { c.Backend, c.MarkBit = "iptables", 31 }),
		`"markMasqBit":0`:            with(func(c *Config) { c.Backend, c.MarkBit = "iptables", 0 }),
		`"externalSetMarkChain":"KUBE-MARK-MASQ"`: with(func(c *Config) { c.Backend, c.MarkChain = "iptables", "KUBE-MARK-MASQ" }),
		`"conditionsV4":["!","-d","192.0.2.0/24"]`: with(func(c *Config) {
			c.Backend, c.ConditionsV4 = "iptables", []string{"!", "-d", "192.0.2.0/24"}
		}),
		`"conditionsV6":["-d","fd00::/64"],"backend":"iptables"`: with(func(c *Config) {
			c.Backend, c.ConditionsV6 = "iptables", []string{"-d", "fd00::/64"}
		}),
		`"conditionsV4":[],"conditionsV6":null`: plain,
		withMappings():                          plain,
		`"runtimeConfig":{"portMappings":null}`: plain,
		withMappings(`{"hostPort":8080,"containerPort":80,"protocol":"TCP","hostIP":"192.0.2.1"}`, `{"hostPort":65535,"containerPort":65535}`,
			`{"hostPort":53,"containerPort":53,"protocol":"udp","hostIP":"0.0.0.0"}`,
			`{"hostPort":9,"containerPort":9,"protocol":"Sctp","hostIP":"::"}`): with(func(c *Config) {
			c.Ports = portList("tcp 192.0.2.1:8080 0.0.0.0:80", "tcp 65535 0.0.0.0:65535", "tcp 65535 [::]:65535", "udp 53 0.0.0.0:53",
				"sctp 9 [::]:9")
			for i := range c.Ports {
				c.Ports[i].SNAT = false // depends on the pod's address
			}
		}),
	} {
		got, err := parsed(keys)
		diff := cmp.Diff(want, got, cmp.Comparer(func(a, b ports.Port) bool { return a == b }), cmp.AllowUnexported(Config{}))
		if diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", keys, err, diff)
		}
	}
}

func TestParseRefused(t *testing.T) {
	mapping := func(host, container int, more string) string {
		return withMappings(fmt.Sprintf(`{"hostPort":%d,"containerPort":%d%s}`, host, container, more))
	}
	for keys, says := range map[string]string{
		`"backend":"ipvs"`:                     `backend "ipvs": want nftables or iptables`,
		`"backend":"nftables","markMasqBit":5`: "options of iptables: markMasqBit",
		`"backend":"nftables","conditionsV6":["-d"],"conditionsV4":["!"],"externalSetMarkChain":"X"`: "options of iptables: conditionsV4, conditionsV6, externalSetMarkChain",
		`"backend":"iptables","conditionsV4":["ip","daddr"]`:                                         "options of nftables: conditionsV4",
		`"markMasqBit":-1`:                                       "markMasqBit -1: want 0-31",
		`"markMasqBit":32`:                                       "markMasqBit 32: want 0-31",
		`"markMasqBit":5,"externalSetMarkChain":"X"`:             "exclude each other",
		`"externalSetMarkChain":""`:                              "want the name of an iptables chain",
		`"externalSetMarkChain":"A B"`:                           "want the name of an iptables chain",
		`"externalSetMarkChain":"X\n-F"`:                         "want the name of an iptables chain",
		`"externalSetMarkChain":"ABCDEFGHIJKLMNOPQRSTUVWXYZ-29"`: "want the name of an iptables chain",
		`"externalSetMarkChain":"-F"`:                            "want the name of an iptables chain",
		`"externalSetMarkChain":"X\u0000"`:                       "want the name of an iptables chain",
		`"conditionsV4":["-j","ACCEPT"]`:                         `conditionsV4: "-j" is not allowed`,
		`"conditionsV4":["-d","a\nCOMMIT"]`:                      "is not allowed",
		`"conditionsV4":["-d","\""]`:                             "is not allowed",
		`"conditionsV4":["-m","comment","--comment",""]`:         "is not allowed",
		mapping(0, 80, ""):                                       "portMappings[0]: Invalid host port number: 0",
		mapping(-1, 80, ""):                                      "Invalid host port number: -1",
		mapping(65536, 80, ""):                                   "Invalid host port number: 65536",
		mapping(80, 0, ""):                                       "Invalid container port number: 0",
		mapping(80, 70000, ""):                                   "Invalid container port number: 70000",
		mapping(80, 80, `,"protocol":"icmp"`):                    `protocol "icmp": want tcp, udp or sctp`,
		mapping(80, 80, `,"protocol":" tcp"`):                    `protocol " tcp"`,
		mapping(80, 80, `,"hostIP":"bogus"`):                     `hostIP "bogus": want an IP address`,
		mapping(80, 80, `,"hostIP":"999.1.1.1"`):                 `hostIP "999.1.1.1": want an IP address`,
		mapping(80, 80, `,"hostIP":"fe80::1%eth0"`):              "want an IP address",
		withMappings(`{"hostPort":80,"containerPort":80}`,
			`{"hostPort":80,"containerPort":81,"protocol":"TCP"}`): "portMappings[1]: hostPort 80 leads to containerPort 80 already",
		withMappings(`{"hostPort":80,"containerPort":80}`, `{}`): "portMappings[1]: Invalid host port number: 0",
	} {
		if c, err := parsed(keys); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v, want %q", keys, c, err, says)
		}
	}
	for _, conditions := range []string{`"ip","daddr","192.0.2.1"`, `"ip daddr != 192.0.2.0/24"`, `"tcp","dport","80"`, `"ip"`} {
		_, err := parsed(`"conditionsV4":[` + conditions + `]`)
		if plugin.Code(err) != plugin.CodeUnsupported || !strings.Contains(err.Error(), "conditionsV4") ||
			!strings.Contains(plugin.Hint(err), `use the iptables backend with conditions such as ["-d", "192.0.2.0/24"]`) {
			t.Errorf("%s: %v, hint %q", conditions, err, plugin.Hint(err))
		}
	}
	for _, keys := range []string{`"snat":"yes"`, `"markMasqBit":1.5`, `"conditionsV4":"-d"`, withMappings(`{"hostPort":"80"}`),
		withMappings(`{"hostPort":1e99}`), withMappings(`7`)} {
		if _, err := parsed(keys); plugin.Code(err) != plugin.CodeDecode {
			t.Errorf("%s: %v", keys, err)
		}
	}
}

// hostileValues are invalid for almost every key, some because of their JSON type.
var hostileValues = []string{`0`, `-1`, `65536`, `4294967376`, `-9223372036854775808`, `18446744073709551617`, `1e3`, `1e999`, `1.5`,
	`80.0`,
	`""`, `"80"`, `"0x50"`, `" "`, `"\u0000"`,
	`"tcp\u0000"`, `"\u202etcp"`, `"\uff11"`, `"\ud800"`, `"a\nb"`, `"a;b"`, `"$(id)"`, `"` + strings.Repeat("A", 100000) + `"`, `true`, `[]`,
	`[1]`, `{}`, `{"a":1}`}

// For any value of a key, Parse returns a valid configuration, or an error with a code and a short one-line message (C-110, S-10, S-15).
func TestParseHostile(t *testing.T) {
	keys := map[string]string{"backend": "", "snat": "", "masqAll": "", "markMasqBit": "", "externalSetMarkChain": "", "conditionsV4": "",
		"conditionsV6":        "",
		"refuseHostListeners": "", "maxHostPorts": "", "runtimeConfig": "", "portMappings": `"runtimeConfig":{"portMappings":%s}`}
	entry := map[string]string{"hostPort": "80", "containerPort": "80", "protocol": `"tcp"`, "hostIP": `"192.0.2.1"`}
	for key := range entry {
		fields := []string{}
		for other, value := range entry {
			if other == key {
				value = "%s"
			}
			fields = append(fields, fmt.Sprintf("%q:%s", other, value))
		}
		keys[key] = withMappings("{" + strings.Join(fields, ",") + "}")
	}
	// These values are valid for a key; an empty string can mean the same as a missing key.
	fine := map[string][]string{"backend": {`""`}, "snat": {"true"}, "masqAll": {"true"}, "markMasqBit": {"0"},
		"refuseHostListeners": {"true"}, "runtimeConfig": {"{}", `{"a":1}`},
		"portMappings": {"[]"}, "conditionsV4": {"[]"}, "conditionsV6": {"[]"}, "externalSetMarkChain": {`"80"`, `"0x50"`}, "protocol": {`""`},
		"hostIP": {`""`}}
	for key, template := range keys {
		if template == "" {
			template = fmt.Sprintf("%q:%%s", key)
		}
		for _, value := range hostileValues {
			c, err := parsed(fmt.Sprintf(template, value))
			short := value[:min(len(value), 40)]
			if slices.Contains(fine[key], value) {
				if err != nil {
					t.Errorf("%s %s: %v", key, short, err)
				}
				continue
			}
			if code := plugin.Code(err); err == nil || code != plugin.CodeConfig && code != plugin.CodeDecode {
				t.Errorf("%s %s: %+v, %v", key, short, c, err)
				continue
			}
			if msg := err.Error(); len(msg) > 500 || strings.ContainsFunc(msg, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("%s %s: %.600q", key, short, msg)
			}
		}
	}
}

// Two entries with the same node port need the same target; duplicates are accepted (S-15).
func TestSamePort(t *testing.T) {
	entry := func(ip string, container int, protocol string) string {
		return fmt.Sprintf(`{"hostPort":80,"containerPort":%d,"hostIP":"%s","protocol":"%s"}`, container, ip, protocol)
	}
	for _, x := range []struct {
		a, b string
		ok   bool
	}{
		{entry("", 1, "tcp"), entry("", 1, "TCP"), true},
		{entry("", 1, "tcp"), entry("", 2, "udp"), true},
		{entry("", 1, "tcp"), entry("", 2, ""), false},
		{entry("", 1, "tcp"), entry("0.0.0.0", 2, "tcp"), false},
		{entry("::", 1, "tcp"), entry("", 2, "tcp"), false},
		{entry("0.0.0.0", 1, "tcp"), entry("::", 2, "tcp"), true},
		{entry("", 1, "tcp"), entry("0.0.0.0", 1, "tcp"), true},
		{entry("", 1, "tcp"), entry("192.0.2.1", 2, "tcp"), true},
		{entry("192.0.2.1", 1, "tcp"), entry("192.0.2.1", 2, "tcp"), false},
		{entry("192.0.2.1", 1, "tcp"), entry("192.0.2.2", 2, "tcp"), true},
		{entry("2001:db8::1", 1, "tcp"), entry("2001:db8:0::1", 2, "tcp"), false},
	} {
		for _, list := range [][]string{{x.a, x.b}, {x.b, x.a}} {
			if _, err := parsed(withMappings(list...)); (err == nil) != x.ok {
				t.Errorf("%s: %v", list, err)
			}
		}
	}
}

// Conditions may contain iptables matches, but no words that change the rule or run a program (S-10).
func TestConditions(t *testing.T) {
	for words, ok := range map[string]bool{
		`"!","-d","192.0.2.0/24"`: true, `"-i","eth0"`: true, `"-m","mark","--mark","0x1/0x1"`: true, `"-m","recent","--set"`: true,
		`"-m","comment","--comment","a b; $(id)"`: true,
		`"-d192.0.2.1"`: true, `"-m","length","--length","-1"`: true, `"-s","fd00::/64"`: true, `"--dst-type=LOCAL"`: true,
		`"-d","a","-jACCEPT"`: false, `"-gX"`: false, `"--jum","ACCEPT"`: false, `"--j=ACCEPT"`: false, `"--got=X"`: false, `"--"`: false,
		`"-d","x","-F"`: false, `"-I","INPUT"`: false,
		`"--modprobe=/bin/sh"`: false, `"--mod=/bin/sh"`: false, `"-M/bin/sh"`: false, `"-t","filter"`: false, `"--tab=filter"`: false,
		`"--flush"`: false, `"--delete","INPUT"`: false,
		`"-f"`: true, `"-fM","/bin/sh"`: false, `"-fM/bin/sh"`: false, `"-fV"`: false, `"--vers"`: false, `"--hel"`: false, `"--h"`: false,
		`"-6"`: false, `"-4M/bin/sh"`: false, `"-m","helper","--helper","ftp"`: true,
		`"-d","a\u0000b"`: false, `"-d","a\tb"`: false, `"-d","a\u0085b"`: false, `"-d","a\"b"`: false, `"-d","a\\"`: false, `"-d",""`: false,
		`"-c","1","2"`: false,
	} {
		c, err := parsed(`"conditionsV6":[` + words + `]`)
		if ok != (err == nil) || !ok && plugin.Code(err) != plugin.CodeConfig {
			t.Errorf("%s: %+v, %v", words, c, err)
		}
	}
}

// FuzzParse checks that each error has a code, and that rules can be written for each accepted configuration.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "{}", "{" + withMappings(`{"hostPort":80,"containerPort":80,"hostIP":"::1"}`) + "}",
		`{"backend":"iptables","conditionsV4":["-d","x"]}`,
		`{"externalSetMarkChain":"X"}`, `{"markMasqBit":31}`, `{"conditionsV6":["ip6"]}`, "{" + withMappings("null") + "}",
		`{"runtimeConfig":[]}`} {
		f.Add(seed)
	}
	pod := []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64")}
	f.Fuzz(func(t *testing.T, config string) {
		c, err := Parse(&plugin.Request{Network: "net", CNIVersion: "1.1.0", Config: []byte(config),
			Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			if code := plugin.Code(err); code != plugin.CodeDecode && code != plugin.CodeConfig && code != plugin.CodeUnsupported {
				t.Errorf("%q: code %d, %v", config, code, err)
			}
			return
		}
		ports := c.hostPorts(pod)
		if len(c.Ports) > 0 && len(ports) == 0 {
			t.Errorf("%q: nothing is mapped", config)
		}
		for _, p := range ports {
			if p.Port == 0 || p.To.Port() == 0 || p.HostIP.IsValid() && p.HostIP.Is4() != p.To.Addr().Is4() {
				t.Errorf("%q: %+v", config, p)
			}
		}
		if len(ports) > 0 && c.Backend == "iptables" {
			for _, line := range jumpLines(emptyNAT(), testKey(), *c.forPod(pod), ports) {
				if strings.ContainsAny(line, "\n\r") || strings.Count(line, `"`)%2 != 0 {
					t.Errorf("%q: the line %q", config, line)
				}
			}
		}
	})
}

// Parse merges 16 or more consecutive ports into a range if the pod uses the same numbers. The others stay separate, and none is lost.
func TestRanges(t *testing.T) {
	pod := []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64")}
	sequence := func(first, n, shift int, more string) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf(`{"hostPort":%d,"containerPort":%d%s}`, first+i, first+i+shift, more))
		}
		return list
	}
	for what, c := range map[string]struct {
		list []string
		want string
	}{
		"15":         {sequence(100, 15, 0, ""), "30 entries, 0 ranges"},
		"16":         {sequence(100, 16, 0, ""), "2 entries, 2 ranges"},
		"reverse":    {reversed(sequence(100, 40, 0, "")), "2 entries, 2 ranges"},
		"gap":        {append(sequence(100, 16, 0, ""), sequence(117, 16, 0, "")...), "4 entries, 4 ranges"},
		"shifted":    {sequence(100, 16, 1, ""), "32 entries, 0 ranges"},
		"hostIP":     {sequence(100, 16, 0, `,"hostIP":"192.0.2.1"`), "16 entries, 0 ranges"},
		"one family": {sequence(100, 16, 0, `,"hostIP":"0.0.0.0"`), "1 entries, 1 ranges"},
		"protocols":  {append(sequence(100, 8, 0, ""), sequence(108, 8, 0, `,"protocol":"udp"`)...), "32 entries, 0 ranges"},
		"to the end": {sequence(65500, 36, 0, ""), "2 entries, 2 ranges"},
	} {
		cfg, err := parsed(withMappings(c.list...))
		if err != nil {
			t.Fatal(what, err)
		}
		all := cfg.hostPorts(pod)
		n := 0
		for _, p := range all {
			if p.Last != 0 {
				n++
			}
		}
		if got := fmt.Sprintf("%d entries, %d ranges", len(all), n); got != c.want {
			t.Errorf("%s: %s, want %s", what, got, c.want)
		}
		iptables := cfg
		iptables.Backend = "iptables"
		want := map[ports.Port]bool{}
		for _, p := range iptables.hostPorts(pod) {
			want[p] = true
		}
		for _, p := range ports.Singles(all) {
			if !want[p] {
				t.Errorf("%s: %+v is unexpected or occurs twice", what, p)
			}
			delete(want, p)
		}
		if len(want) > 0 {
			t.Errorf("%s: %d are lost", what, len(want))
		}
	}
}

func reversed(list []string) []string {
	slices.Reverse(list)
	return list
}
