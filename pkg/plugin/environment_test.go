// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestValidID(t *testing.T) {
	for _, s := range []string{"a", "0", "A_b.c-d", "a..", strings.Repeat("f", 64), strings.Repeat("x", 255)} {
		if err := validID(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []string{"", ".", "..", "-a", "_a", ".a", "a b", "a/b", "../x", "/", "ok\n", "\n", "a\x00", "é", "a:b", "a%d", "a\\b",
		"a;b", "$(id)", "a\tb", strings.Repeat("x", 256), strings.Repeat("x", 4096)} {
		if validID(s) == nil {
			t.Errorf("%q is accepted", s)
		}
	}
}

func TestValidIfName(t *testing.T) {
	for _, s := range []string{"e", "eth0", "net1.100", "a-b", "lo", "fifteen-bytes-x", "e@f"} {
		if err := ValidIfName(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range []string{"", ".", "..", "all", "default", "-x", "a/b", "a:b", "a b", "a\tb", "a\n", "a\x01", "a\x7f", "%d", "eth%d",
		"a\u00a0b", "a\u200bb", "\xff", "sixteen-bytes-xx", strings.Repeat("\U0001F680", 5)} {
		if ValidIfName(s) == nil {
			t.Errorf("%q is accepted", s)
		}
	}
}

// ADD, CHECK and DEL reject invalid container IDs and interface names with an error that has the variable's name and its escaped value.
func TestHostileNames(t *testing.T) {
	for _, verb := range []string{"ADD", "CHECK", "DEL"} {
		for variable, values := range map[string][]string{
			"CNI_CONTAINERID": {"a b", "../x", "a/b", "ok\n", "é", "\x1b[31m", strings.Repeat("a", 300)},
			"CNI_IFNAME":      {"eth%d", "all", "..", "a/b", "-x", "\u202e", "sixteen-bytes-xx"},
		} {
			for _, value := range values {
				rec := &recorder{}
				f := run(rec.plugin(), newEnv(verb).with("CNI_NETNS", "/nowhere", variable, value), config(`"prevResult":{}`)).mustFail(t,
					CodeEnvironment)
				if !strings.Contains(f.Msg, variable) || strings.ContainsFunc(f.Msg+f.Details, unprintable) || len(f.Msg) > 1000 {
					t.Errorf("%s %s=%q: %+v", verb, variable, value, f)
				}
				if len(rec.requests) > 0 {
					t.Errorf("%s %s=%q reached the plugin", verb, variable, value)
				}
			}
		}
	}
}

func unprintable(c rune) bool { return c < ' ' || c > '~' }

func TestMissingVariables(t *testing.T) {
	for verb, names := range map[string][]string{
		"ADD": {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}, "CHECK": {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"},
		"DEL": {"CNI_CONTAINERID", "CNI_IFNAME"}, "GC": {"CNI_PATH"},
	} {
		f := run((&recorder{}).plugin(), environ{"CNI_COMMAND": verb}, config("")).mustFail(t, CodeEnvironment)
		if want := strings.ToLower("recorder "+verb) + ": required environment variables missing: " + strings.Join(names, ", "); f.Msg != want {
			t.Errorf("%q: want %q", f.Msg, want)
		}
	}
	rec := &recorder{}
	run(rec.plugin(), environ{"CNI_COMMAND": "STATUS"}, config("")).mustSucceed(t, "")
	if len(rec.requests) != 1 {
		t.Error("STATUS needs no variable and did not arrive")
	}
}

func TestCommand(t *testing.T) {
	for _, verb := range []string{"FOO", "add", "ADD ", "ADD\n", strings.Repeat("A", 5000)} {
		if f := run(Plugin{Name: "x"}, newEnv(verb), config("")).mustFail(t, CodeEnvironment); !strings.Contains(f.Msg, "CNI_COMMAND") ||
			len(f.Msg) > 1000 {
			t.Errorf("%q: %+v", verb, f)
		}
	}
	o := run(Plugin{Name: "x", MinVersion: "0.3.0"}, environ{}, "")
	o.mustSucceed(t, "")
	if !strings.Contains(o.stderr, "CNI x plugin") || !strings.Contains(o.stderr, "0.3.0") || strings.Contains(o.stderr, "0.2.0") {
		t.Errorf("about text %q", o.stderr)
	}
}

func TestCheckArgs(t *testing.T) {
	for s, ok := range map[string]bool{
		"": true, ";": true, "MAC=a;IP=b": true, "K8S_POD_NAME=a;K8S_POD_NAMESPACE=b;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=d;": true,
		"IgnoreUnknown=1;X=1": true, "X=1;IgnoreUnknown=true": true, "X=1;IgnoreUnknown=True;Y=2": true, "IgnoreUnknown=1;bare": true,
		"MAC=a=b=c": true, "MAC=a;MAC=b": true, "IgnoreUnknown=0": true,
		"X=1": false, "IgnoreUnknown=0;X=1": false, "IgnoreUnknown=;X=1": false, "CommonArgs=1": false, "bare": false, "=v": false,
		"mac=x": false,
	} {
		err := checkArgs(s, parseArgs(s))
		if (err == nil) != ok || err != nil && Code(err) != CodeEnvironment {
			t.Errorf("%q: %v, want ok %t", s, err, ok)
		}
	}
}

func TestParseArgs(t *testing.T) {
	want := map[string]string{"A": "1=2", "B": "", "K8S_POD_NAME": "web-0"}
	if diff := cmp.Diff(want, parseArgs("A=0;A=1=2;B=;bare;;K8S_POD_NAME=web-0;")); diff != "" {
		t.Error(diff)
	}
}

// DEL works with invalid CNI_ARGS and still reads the pod's name. ADD refuses unknown keys in them.
func TestBadArgsOnDel(t *testing.T) {
	rec := &recorder{}
	run(rec.plugin(), newEnv("DEL").with("CNI_ARGS", "bare;X=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"), config("")).mustSucceed(t, "")
	if len(rec.requests) != 1 || rec.requests[0].Pod.String() != "shop/web-0" || len(rec.requests[0].Path) != 1 {
		t.Errorf("got %+v", rec.requests)
	}
	f := run(rec.plugin(), newEnv("ADD").with("CNI_NETNS", "/nowhere", "CNI_ARGS", "X=1"), config("")).mustFail(t, CodeEnvironment)
	if !strings.Contains(f.Msg, `unknown key "X"`) || !strings.Contains(f.Details, "IgnoreUnknown=1") {
		t.Errorf("got %+v", f)
	}
}

// A plugin with ForeignArgs accepts any CNI_ARGS, and logs invalid arguments.
func TestForeignArgs(t *testing.T) {
	for args, says := range map[string]string{"none": `\"none\": want KEY=VALUE`,
		"X=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0": `unknown key \"X\"`} {
		for _, verb := range []string{"ADD", "CHECK"} {
			rec := &recorder{}
			p := rec.plugin()
			p.ForeignArgs, p.NoNetns = true, true
			o := run(p, newEnv(verb).with("CNI_NETNS", "/nowhere", "CNI_ARGS", args), config(`"prevResult":{}`))
			if o.exit != 0 || len(rec.requests) != 1 || !strings.Contains(o.stderr, says) {
				t.Errorf("%s %s: %+v", verb, args, o)
			}
		}
	}
}

func TestSearchPath(t *testing.T) {
	for path, want := range map[string][]string{":/a::/b c:": {"/a", "/b c"}, "": {}} {
		r := &Request{Verb: "STATUS"}
		err := r.readEnvironment(func(name string) string { return map[string]string{"CNI_PATH": path}[name] })
		if diff := cmp.Diff(want, r.Path); diff != "" || err != nil {
			t.Error(err, diff)
		}
	}
}

func TestQuote(t *testing.T) {
	if got := quote("a\n\x1bé" + strings.Repeat("x", 200)); strings.ContainsFunc(got, unprintable) || len(got) > 120 {
		t.Errorf("got %s", got)
	}
}
