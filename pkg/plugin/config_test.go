// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestNetworkName(t *testing.T) {
	for _, name := range []string{"", "a/b", "../x", "a b", ".", "a\\n", strings.Repeat("x", 256)} {
		for _, verb := range []string{"DEL", "GC", "STATUS"} {
			f := run((&recorder{}).plugin(), newEnv(verb), `{"cniVersion":"1.1.0","name":"`+name+`"}`).mustFail(t, CodeConfig)
			if !strings.Contains(f.Msg, "network name") {
				t.Errorf("%s %q: %+v", verb, name, f)
			}
		}
	}
}

func TestVersionGate(t *testing.T) {
	for verb, oldest := range map[string]string{"ADD": "0.1.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"} {
		for _, v := range allVersions() {
			err := (Plugin{}).CheckVersion(verb, v)
			if want := slices.Index(allVersions(), v) >= slices.Index(allVersions(), oldest); (err == nil) != want {
				t.Errorf("%s in %s: %v", verb, v, err)
			}
		}
	}
	for _, v := range []string{"0.0.9", "1.2.0", "1.1", "x", "1.1.0 ", "\x1b"} {
		err := (Plugin{}).CheckVersion("ADD", v)
		if Code(err) != CodeVersion || !strings.Contains(err.Error(), "supported are 0.1.0, 0.2.0") {
			t.Errorf("%q: %v", v, err)
		}
	}
	if err := (Plugin{MinVersion: "0.3.0"}).CheckVersion("ADD", "0.2.0"); Code(err) != CodeVersion {
		t.Errorf("below the plugin's oldest: %v", err)
	}
}

// An error document has the version of the configuration, or the newest if that is not supported.
func TestVersionOfErrors(t *testing.T) {
	for in, want := range map[string]string{`"0.3.1"`: "0.3.1", `"1.0.0"`: "1.0.0", `""`: "0.1.0", `"9.9.9"`: "1.1.0", `7`: "1.1.0"} {
		o := run((&recorder{}).plugin(), newEnv("ADD"), `{"name":"net","cniVersion":`+in+`}`)
		if f := o.mustFail(t, CodeEnvironment); f.CNIVersion != want {
			t.Errorf("%s: %+v, want %s", in, f, want)
		}
	}
}

// An error of CheckVersion prevents the call of the plugin.
func TestVersionRefused(t *testing.T) {
	for verb, v := range map[string]string{"ADD": "9.9.9", "CHECK": "0.3.1", "GC": "1.0.0", "STATUS": "1.0.0"} {
		rec := &recorder{}
		o := run(rec.plugin(), newEnv(verb).with("CNI_NETNS", "/nowhere"), `{"name":"net","cniVersion":"`+v+`"}`)
		if f := o.mustFail(t, CodeVersion); !strings.Contains(f.Msg, v) || len(rec.requests) > 0 {
			t.Errorf("%s in %s: %+v", verb, v, f)
		}
	}
}

// DEL works with any version in the configuration, so that attachments can be deleted after an upgrade or a downgrade.
func TestDelOfOtherVersion(t *testing.T) {
	for _, v := range append(allVersions(), "9.9.9", "x", "") {
		rec := &recorder{}
		run(rec.plugin(), newEnv("DEL"), `{"name":"net","cniVersion":"`+v+`"}`).mustSucceed(t, "")
		if len(rec.requests) != 1 {
			t.Errorf("%q did not arrive", v)
		}
	}
}

// prevResults returns the same result in the format of each version.
func prevResults() map[string]string {
	old := `"ip4":{"ip":"10.1.0.5/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0"}]}`
	mid := `"interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"version":"4","interface":0,"address":"10.1.0.5/24","gateway":"10.1.0.1"}]`
	now := `"interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.1.0.5/24","gateway":"10.1.0.1"}]`
	return map[string]string{"0.1.0": old, "0.2.0": old, "0.3.0": mid, "0.3.1": mid, "0.4.0": mid, "1.0.0": now, "1.1.0": now}
}

func TestPrevResult(t *testing.T) {
	for v, body := range prevResults() {
		for name, raw := range map[string]string{
			"same version": `{"cniVersion":"` + v + `",` + body + `}`,
			"none":         `{` + body + `}`,
			"capital":      `{"CNIVersion":"` + v + `",` + body + `}`,
		} {
			res, _, err := prevResult(envelope{CNIVersion: v, PrevResult: json.RawMessage(raw)})
			if err != nil || len(res.IPs) != 1 || res.IPs[0].Address.String() != "10.1.0.5/24" || res.CNIVersion != "1.1.0" {
				t.Errorf("%s, %s: %+v, %v", v, name, res, err)
			}
		}
	}
	res, _, err := prevResult(envelope{CNIVersion: "1.1.0",
		PrevResult: json.RawMessage(`{"cniVersion":"0.4.0",` + prevResults()["0.4.0"] + `}`)})
	if err != nil || len(res.IPs) != 1 {
		t.Errorf("of another version than the configuration: %+v, %v", res, err)
	}
}

func TestPrevResultRefused(t *testing.T) {
	for _, raw := range []string{`[]`, `"x"`, `7`, `{"cniVersion":"9.9.9"}`, `{"cniVersion":7}`, `{"ips":"x"}`, `{"ips":[{"address":"x"}]}`} {
		if res, _, err := prevResult(envelope{CNIVersion: "1.1.0", PrevResult: json.RawMessage(raw)}); err == nil {
			t.Errorf("%s: accepted as %+v", raw, res)
		}
	}
	for _, raw := range []string{"", "null", " null "} {
		if res, _, err := prevResult(envelope{CNIVersion: "1.1.0", PrevResult: json.RawMessage(raw)}); res != nil || err != nil {
			t.Errorf("%q: %v, %v: want none", raw, res, err)
		}
	}
}

// CHECK and chained plugins require a prevResult. DEL and STATUS ignore an invalid one.
func TestPrevResultRules(t *testing.T) {
	pod := kerneltest.NewPod(t)
	for _, c := range []struct {
		verb, keys string
		chained    bool
		code       uint
	}{
		{"ADD", "", false, 0}, {"ADD", "", true, CodeConfig}, {"ADD", `"prevResult":null`, true, CodeConfig}, {"CHECK", "", false, CodeConfig},
		{"DEL", "", true, 0}, {"STATUS", "", true, 0}, {"ADD", `"prevResult":{}`, true, 0}, {"CHECK", `"prevResult":{}`, true, 0},
		{"ADD", `"prevResult":[]`, true, CodeDecode}, {"CHECK", `"prevResult":{"cniVersion":"9.9.9"}`, true, CodeDecode},
		{"DEL", `"prevResult":[]`, true, 0}, {"STATUS", `"prevResult":[]`, true, 0},
	} {
		rec := &recorder{}
		p := rec.plugin()
		p.Chained = c.chained
		o := run(p, newEnv(c.verb).with("CNI_NETNS", pod.Path), config(c.keys))
		if c.code == 0 && (o.exit != 0 || len(rec.requests) != 1) {
			t.Errorf("%+v: exit %d, %s", c, o.exit, o.stdout)
		} else if c.code != 0 {
			o.mustFail(t, c.code)
		}
	}
}

// Both null and [] are an empty list of valid attachments. GC fails if the list is missing or of another JSON type (C-81).
func TestValidAttachments(t *testing.T) {
	a, b := Attachment{"a", "eth0"}, Attachment{"b", "net1"}
	for keys, want := range map[string]map[Attachment]bool{
		`"cni.dev/valid-attachments":null`: {},
		`"cni.dev/valid-attachments":[]`:   {},
		// libcni passes the list of valid attachments as cni.dev/valid-attachments and as cni.dev/attachments.
		`"cni.dev/valid-attachments":[],"cni.dev/attachments":[{"containerID":"a","ifname":"eth0"}]`:                  {},
		`"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"net1","x":1}]`: {a: true, b: true},
	} {
		rec := &recorder{}
		run(rec.plugin(), newEnv("GC"), config(keys)).mustSucceed(t, "")
		if diff := cmp.Diff(want, rec.requests[0].Valid); diff != "" {
			t.Errorf("%s:\n%s", keys, diff)
		}
	}
	for keys, code := range map[string]uint{
		"":                                                  CodeConfig, // without a list nothing may be collected
		`"cni.dev/valid-attachments":{}`:                    CodeDecode,
		`"cni.dev/valid-attachments":"x"`:                   CodeDecode,
		`"cni.dev/valid-attachments":[1]`:                   CodeDecode,
		`"cni.dev/valid-attachments":[{}]`:                  CodeConfig,
		`"cni.dev/valid-attachments":[null]`:                CodeConfig,
		`"cni.dev/attachments":[]`:                          CodeConfig,
		`"cni.dev/valid-attachments":[{"a":1}]`:             CodeConfig,
		`"cni.dev/valid-attachments":[{"containerID":"a"}]`: CodeConfig,
		`"cni.dev/valid-attachments":[{"ifname":"eth0"}]`:   CodeConfig,
	} {
		rec := &recorder{}
		run(rec.plugin(), newEnv("GC"), config(keys)).mustFail(t, code)
		if len(rec.requests) > 0 {
			t.Errorf("%s reached the plugin", keys)
		}
	}
}
