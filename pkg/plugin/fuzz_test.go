// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
)

// newQuiet returns a Request without input that discards its log.
func newQuiet(verb string) *Request {
	r := &Request{Plugin: "fuzz", Verb: verb, CNIVersion: "1.1.0"}
	r.log = io.Discard
	r.Log = r.logger()
	return r
}

// FuzzConfig checks that an accepted configuration has a name and a version, and that the output for a rejected one is exactly one error
// document.
func FuzzConfig(f *testing.F) {
	for _, seed := range []string{"", "{}", "[]", "null", config(""), config(`"prevResult":{}`), config(`"cni.dev/valid-attachments":[]`),
		`{"cniVersion":"0.4.0","name":"a"}`, `{"cniVersion":7}`, `{"name":"../x"}`, config(`"prevResult":{"ips":[{"address":"10.0.0.1/8"}]}`)} {
		for verb := range 4 {
			f.Add(uint8(verb), seed)
		}
	}
	f.Fuzz(func(t *testing.T, verb uint8, stdin string) {
		rec := &recorder{}
		p := rec.plugin()
		e := newEnv([]string{"DEL", "GC", "STATUS", "ADD"}[verb%4]).with("CNI_NETNS", "/nowhere")
		o := run(p, e, stdin)
		if o.exit == 0 {
			if r := rec.requests[0]; o.stdout != "" || validID(r.Network) != nil || !p.supports(r.CNIVersion) {
				t.Fatalf("accepted network %q in version %q", r.Network, r.CNIVersion)
			}
			return
		}
		var fail errorDocument
		if err := json.Unmarshal([]byte(o.stdout), &fail); err != nil {
			t.Fatal(err)
		}
		if fail.Code == 0 || fail.Code == CodeInternal || !p.supports(fail.CNIVersion) ||
			strings.ContainsFunc(fail.Msg+fail.Details, unprintable) {
			t.Fatalf("got %+v", fail)
		}
	})
}

func FuzzArgs(f *testing.F) {
	for _, seed := range []string{"", ";", "=", "A=1", "A=1;B=2;", "A=b=c", "IgnoreUnknown=1;X=2", "K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop",
		"bare"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		args := parseArgs(s)
		for k, v := range args {
			if strings.ContainsAny(k, "=;") || strings.Contains(v, ";") || !strings.Contains(s, k+"="+v) {
				t.Errorf("%q: %q has the value %q", s, k, v)
			}
		}
		if err := checkArgs(s, args); err != nil && Code(err) != CodeEnvironment {
			t.Errorf("%q: %v", s, err)
		}
	})
}

// FuzzPrevResult checks that an accepted result contains no null entries and can be encoded again.
func FuzzPrevResult(f *testing.F) {
	for v, body := range prevResults() {
		f.Add(v, `{`+body+`}`)
		f.Add(v, `{"cniVersion":"`+v+`",`+body+`}`)
	}
	for _, seed := range []string{`{"interfaces":[null]}`, `{"ips":[null]}`, `{"routes":[null]}`, `{"ips":[{}]}`, `{"ips":[{"interface":-1}]}`,
		`{"dns":null}`, `[]`} {
		f.Add("1.1.0", seed)
		f.Add("0.4.0", seed)
		f.Add("0.2.0", seed)
	}
	f.Fuzz(func(t *testing.T, v, raw string) {
		if !json.Valid([]byte(raw)) {
			return
		}
		res, _, err := prevResult(envelope{CNIVersion: v, PrevResult: json.RawMessage(raw)})
		if err != nil || res == nil {
			return
		}
		for _, v := range allVersions() {
			if _, err := encodeResult(res, v); err != nil && Code(err) != CodeVersion {
				t.Errorf("in version %s: %v", v, err)
			}
		}
	})
}

func FuzzValidAttachments(f *testing.F) {
	for _, seed := range []string{"null", "[]", `[{"containerID":"a","ifname":"b"}]`, `[{}]`, `{}`, `[null]`, `7`,
		`[{"containerID":"a","containerID":"","ifname":"b"}]`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		r := newQuiet("GC")
		err := r.readValid([]byte(`{"cni.dev/valid-attachments":` + list + `}`))
		if err != nil {
			if code := Code(err); code != CodeDecode && code != CodeConfig {
				t.Errorf("%v: code %d", err, code)
			}
			return
		}
		for a := range r.Valid {
			if a.ContainerID == "" || a.IfName == "" {
				t.Errorf("%q: accepted %+v", list, a)
			}
		}
	})
}

// FuzzPrintable checks that printable and quote remove special characters and truncate long text, so that external text cannot forge a log
// line.
func FuzzPrintable(f *testing.F) {
	for _, seed := range []string{"", "a", "a\nb", "\x1b[31m", "é\u202e", "\xff", strings.Repeat("x", 50)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for _, out := range []string{Plain(s, 20), quote(s)} {
			if strings.ContainsFunc(out, unprintable) || len(out) > 1000 {
				t.Errorf("%q became %q", s, out)
			}
		}
	})
}

// FuzzDecode checks that, for any keys, Decode returns either no error or one with CodeDecode.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"bridg":1}`, `{"ipam":null}`, `{"ipam":{"x":{}}}`, `{"rate":"x"}`, `{"":1}`, `{"\u0000":[]}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, config string) {
		r := newQuiet("ADD")
		r.Config = []byte(config)
		for _, err := range []error{r.Decode(&mirrorConf{}), r.DecodeWithin("ipam", &mirrorConf{})} {
			if err != nil && Code(err) != CodeDecode {
				t.Errorf("%q: %v", config, err)
			}
		}
	})
}
