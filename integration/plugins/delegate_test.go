// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// stubIPAM is an IPAM plugin: a shell script that saves its input and runs the test's script.
type stubIPAM struct {
	dir string
	f   *harness.Fixture
}

const stubScript = `#!/bin/sh
env | grep -E '^(CNI_|TRACE)' | sort > "$0.$CNI_COMMAND.env"
cat > "$0.$CNI_COMMAND.stdin"
echo "stub says hello" >&2
if [ -f "$0.$CNI_COMMAND.sh" ]; then . "$0.$CNI_COMMAND.sh"; fi
`

const stubResult = `{"cniVersion":"1.1.0","ips":[{"address":"10.70.0.200/24","gateway":"10.70.0.1"}],"routes":[{"dst":"192.0.2.0/24"}]}`

func newStub(t *testing.T) *stubIPAM {
	t.Helper()
	s := &stubIPAM{dir: t.TempDir(), f: harness.NewFixture(t, harness.ChainPlugins()[0])}
	if err := os.WriteFile(s.path(), []byte(stubScript), 0o755); err != nil {
		t.Fatal(err)
	}
	s.setScript(t, "ADD", "echo '"+stubResult+"'")
	t.Cleanup(func() { s.call("DEL").Run(t) })
	return s
}

func (s *stubIPAM) path() string { return filepath.Join(s.dir, "stub") }

func (s *stubIPAM) setScript(t *testing.T, verb, script string) {
	t.Helper()
	if err := os.WriteFile(s.path()+"."+verb+".sh", []byte(script+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// savedInput returns the stub's saved input for a verb, or "" if the stub was not called.
func (s *stubIPAM) savedInput(verb, part string) string {
	b, _ := os.ReadFile(s.path() + "." + verb + "." + part)
	return string(b)
}

func (s *stubIPAM) conf() object {
	return harness.BridgeConf().With("ipam", object{"type": "stub", "ownKey": "kept"})
}

func (s *stubIPAM) call(verb string) harness.Call {
	return s.f.Good(verb, harness.ChainPlugins()[0]).With("CNI_PATH", s.dir+":"+harness.BinDir()).Config(s.conf())
}

// TestDelegate runs bridge with another project's IPAM plugin, which gets bridge's environment and configuration and whose results bridge
// uses.
func TestDelegate(t *testing.T) {
	s := newStub(t)
	o := s.call("ADD").With("TRACEPARENT", "00-1-2-01").Run(t).OK(t)
	if !strings.Contains(o.Stdout, "10.70.0.200/24") || !strings.Contains(o.Stderr, "stub says hello") {
		t.Errorf("the stub's address or its stderr is missing: %s%s", o.Stdout, o.Stderr)
	}
	for _, want := range []string{
		"CNI_COMMAND=ADD", "CNI_CONTAINERID=" + s.f.Fresh.Name, "CNI_IFNAME=eth0", "CNI_NETNS=" + s.f.Fresh.Path, "CNI_ARGS=" + harness.PodArgs,
		"CNI_PATH=" + s.dir + ":" + harness.BinDir(), "TRACEPARENT=00-1-2-01",
	} {
		if !strings.Contains(s.savedInput("ADD", "env"), want+"\n") {
			t.Errorf("the stub's environment lacks %s:\n%s", want, s.savedInput("ADD", "env"))
		}
	}
	if !reflect.DeepEqual(harness.RawObject(t, s.savedInput("ADD", "stdin")), harness.RawObject(t, string(s.call("ADD").Stdin))) {
		t.Errorf("the stub got another configuration: %s", s.savedInput("ADD", "stdin"))
	}
	if err := harness.Ping(nil, "10.70.0.200", harness.TrafficLimit); err != nil {
		t.Errorf("ping: %v", err)
	}
	s.call("CHECK").Config(s.conf().With("prevResult", harness.RawObject(t, o.Stdout))).Run(t).OK(t)
	s.call("GC").Config(s.conf().With("cni.dev/valid-attachments", []any{
		object{"containerID": s.f.Fresh.Name, "ifname": "eth0"}, object{"containerID": s.f.Attached.Name, "ifname": "eth0"},
	})).Run(t).OK(t)
	s.call("STATUS").Run(t).OK(t)
	s.call("DEL").Run(t).OK(t)
	for _, verb := range []string{"CHECK", "GC", "STATUS", "DEL"} {
		if s.savedInput(verb, "env") == "" {
			t.Errorf("%s did not reach the stub", verb)
		}
	}
	s.f.Oracle.Clean(t, "ADD and DEL with the stub")
}

// TestDelegateGC (C-84): GC of bridge calls that of the IPAM plugin, with the list of valid attachments.
func TestDelegateGC(t *testing.T) {
	s := newStub(t)
	s.call("ADD").Run(t).OK(t)
	attached, fresh := object{"containerID": s.f.Attached.Name, "ifname": "eth0"}, object{"containerID": s.f.Fresh.Name, "ifname": "eth0"}
	conf := s.conf().With("cni.dev/valid-attachments", []any{attached})
	gc := s.call("GC").With("CNI_CONTAINERID", "", "CNI_NETNS", "", "CNI_ARGS", "K8S_POD_NAME=unknown")
	passed := func(want ...any) {
		t.Helper()
		var got []object
		keys := map[string]json.RawMessage{}
		text := []byte(s.savedInput("GC", "stdin"))
		if err := errors.Join(json.Unmarshal(text, &keys), json.Unmarshal(keys["cni.dev/valid-attachments"], &got)); err != nil {
			t.Fatalf("the stub got %q: %v", text, err)
		}
		slices.SortFunc(got, func(a, b object) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		slices.SortFunc(want, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
		if string(harness.Encode(got)) != string(harness.Encode(want)) {
			t.Errorf("the valid attachments for the stub are %s, want %s", harness.Encode(got), harness.Encode(want))
		}
		_ = os.Remove(s.path() + ".GC.stdin")
	}
	gc.Config(conf).Run(t).OK(t)
	passed(attached, fresh) // both plugins keep a recent attachment
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	gc.Config(conf.With("podlace/dead-attachments", []any{fresh})).Run(t).OK(t)
	if s.savedInput("GC", "stdin") != "" {
		t.Error("GC of named attachments was passed to a plugin that does not know the names")
	}
	gc.Config(conf).Run(t).OK(t)
	passed(attached)
	env := s.savedInput("DEL", "env")
	for _, want := range []string{"CNI_CONTAINERID=" + s.f.Fresh.Name, "CNI_NETNS=", "CNI_ARGS="} {
		if !strings.Contains(env, want+"\n") {
			t.Errorf("the stub's DEL lacks %s:\n%s", want, env)
		}
	}
	s.f.Oracle.Clean(t, "GC with the stub")
}

// TestDelegateFails lets ADD of the IPAM plugin fail in different ways. bridge undoes its changes, calls the IPAM plugin's DEL, and returns
// its error.
func TestDelegateFails(t *testing.T) {
	s := newStub(t)
	ways := map[string]string{
		"an error":           `echo '{"cniVersion":"1.1.0","code":11,"msg":"busy","details":"later"}'; exit 1`,
		"an error, no JSON":  "echo oops; exit 1",
		"an error, nothing":  "exit 3",
		"killed":             "kill -9 $$",
		"nothing":            "exit 0",
		"null":               "echo null",
		"no addresses":       `echo '{"cniVersion":"1.1.0"}'`,
		"two documents":      "echo '" + stubResult + stubResult + "'",
		"garbage":            "head -c 5242880 /dev/zero | tr '\\0' x",
		"a bad address":      strings.ReplaceAll("echo '"+stubResult+"'", "10.70.0.200/24", "10.70.0.900/24"),
		"another version":    strings.ReplaceAll("echo '"+stubResult+"'", "1.1.0", "9.9.9"),
		"an unusable prefix": strings.ReplaceAll("echo '"+stubResult+"'", "10.70.0.200/24", "10.70.0.200/0"),
	}
	for title, script := range harness.InOrder(ways) {
		t.Run(title, func(t *testing.T) {
			_ = os.Remove(s.path() + ".DEL.env")
			s.setScript(t, "ADD", script)
			f := s.call("ADD").Run(t).Refused(t, allCodes()...)
			if title == "an error" && (f.Code != 11 || !strings.Contains(f.Msg, "busy")) {
				t.Errorf("code %d msg %q: want the stub's code 11 and busy", f.Code, f.Msg)
			}
			if s.savedInput("DEL", "env") == "" {
				t.Error("the stub got no DEL for its address")
			}
			s.f.Oracle.Clean(t, title)
		})
	}
}

// allCodes are the codes that are accepted where the exact one does not matter. 999, for an internal defect, is not among them.
func allCodes() []int { return []int{5, 6, 7, 11, 50, 101, 102, 103, 104, 105} }

func TestDelegateMissing(t *testing.T) {
	s := newStub(t)
	if err := os.WriteFile(s.dir+"/text", []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.dir+"/folder", 0o755); err != nil {
		t.Fatal(err)
	}
	for title, c := range harness.InOrder(map[string]harness.Call{
		"not there":      s.call("ADD").Config(s.conf().With("ipam.type", "no-such-plugin")),
		"no CNI_PATH":    s.call("ADD").With("CNI_PATH", ""),
		"not executable": s.call("ADD").Config(s.conf().With("ipam.type", "text")),
		"a folder":       s.call("ADD").Config(s.conf().With("ipam.type", "folder")),
	}) {
		mustRefuse(t, s.f, title, c, "", append(allCodes(), harness.CodeEnv)...)
	}
	s.call("ADD").With("CNI_PATH", ":/nonexistent:"+s.dir).Run(t).OK(t)
	s.call("DEL").With("CNI_PATH", ":/nonexistent:"+s.dir).Run(t).OK(t)
	s.f.Oracle.Clean(t, "CNI_PATH with empty entries")
}

// TestDelegateStatus: STATUS of the bridge plugin returns the error code of its IPAM plugin.
func TestDelegateStatus(t *testing.T) {
	s := newStub(t)
	for _, code := range []int{50, 51} {
		s.setScript(t, "STATUS", fmt.Sprintf(`echo '{"cniVersion":"1.1.0","code":%d,"msg":"full"}'; exit 1`, code))
		s.call("STATUS").Run(t).Refused(t, code)
	}
	s.f.Oracle.Clean(t, "STATUS")
}

// TestPrevResult: a plugin's result contains the interfaces of earlier plugins, in every CNI version.
func TestPrevResult(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		if plugin == "host-local" {
			return // an IPAM plugin is not part of a chain
		}
		for title, edit := range harness.InOrder(map[string][]any{
			"as it is": {}, "no version": {"cniVersion", nil}, "odd spelling": {"cniVersion", nil, "CNIVersion", "1.1.0"},
		}) {
			t.Run(title, func(t *testing.T) {
				f.Life(t, plugin, func() {
					conf := f.Conf(plugin).With("prevResult", prevFor(t, f, plugin).With(edit...))
					o := f.Good("ADD", plugin).Config(conf).Run(t).OK(t)
					if !strings.Contains(o.Stdout, "other0") {
						t.Errorf("the interface of an earlier plugin is gone: %s", o.Stdout)
					}
					f.Good("DEL", plugin).Config(conf).Run(t).OK(t)
				})
				f.Oracle.Clean(t, title)
			})
		}
	})
}

// prevFor returns a prevResult that contains an interface of an unknown plugin.
func prevFor(t *testing.T, f *harness.Fixture, plugin string) object {
	t.Helper()
	prev := object{"cniVersion": "1.1.0", "interfaces": []any{}}
	if harness.Chained(plugin) {
		prev = harness.RawObject(t, string(f.Prev))
	}
	return prev.With("interfaces", append(prev["interfaces"].([]any), object{"name": "other0", "mac": "02:00:00:00:00:09"}))
}

// TestDNS: DNS settings in the bridge's configuration override the DNS settings of the IPAM plugin.
func TestDNS(t *testing.T) {
	s := newStub(t)
	s.setScript(t, "ADD", "echo '"+strings.Replace(stubResult, "{", `{"dns":{"nameservers":["192.0.2.1"],"domain":"a"},`, 1)+"'")
	for want, conf := range map[string]object{
		`{"domain":"a","nameservers":["192.0.2.1"]}`: s.conf(),
		`{"nameservers":["192.0.2.2"]}`:              s.conf().With("dns.nameservers", []any{"192.0.2.2"}),
	} {
		result := harness.RawObject(t, s.call("ADD").Config(conf).Run(t).OK(t).Stdout)
		if got, err := json.Marshal(result["dns"]); err != nil || string(got) != want {
			t.Errorf("dns is %s, want %s", got, want)
		}
		s.call("DEL").Config(conf).Run(t).OK(t)
	}
	s.f.Oracle.Clean(t, "dns")
}
