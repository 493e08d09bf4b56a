// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"strings"
	"testing"
)

type embedded struct {
	Rate int `json:"rate"`
}

// mirrorConf has the keys of a plugin's configuration.
type mirrorConf struct {
	embedded
	Bridge string `json:"bridge"`
	IPAM   *struct {
		Subnet string `json:"subnet"`
	} `json:"ipam"`
	Args struct {
		CNI struct{} `json:"cni"`
	} `json:"args"`
	Hidden string `json:"-"`
}

// decodeWarnings decodes a configuration and returns the log lines about unknown keys.
func decodeWarnings(t *testing.T, decode func(*Request, any) error, config string) (lines []string) {
	t.Helper()
	var log bytes.Buffer
	r := &Request{Config: []byte(config)}
	r.log = &log
	r.Log = r.logger()
	if err := decode(r, &mirrorConf{}); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "unknown key") {
			lines = append(lines, strings.Replace(line[strings.Index(line, "unknown key"):], ` plugin="" verb=""`, "", 1))
		}
	}
	return lines
}

func TestUnknownKeys(t *testing.T) {
	decode := func(r *Request, raw any) error { return r.Decode(raw) }
	for config, want := range map[string]string{
		`{"bridge":"a","rate":1,"BRIDGE":"b","type":"x","dns":{"x":1},"cni.dev/x":1,"prevResult":{"x":1},"runtimeConfig":{"x":1}}`: "",
		`{"args":{"cni":{"labels":[]},"x":1}}`: "",
		`{"bridg":"a"}`:                        `unknown key is ignored; did you mean bridge?" key=bridg`,
		`{"ipam":{"subnett":"x"}}`:             `unknown key is ignored; did you mean subnet?" key=ipam.subnett`,
		`{"Hidden":"x"}`:                       `unknown key is ignored" key=Hidden`,
		"{\"a\\nb\u202e\":1}":                  `unknown key is ignored" key="\"a\\nb\\u202e\""`,
	} {
		got := decodeWarnings(t, decode, config)
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || strings.TrimSpace(got[0]) != want) {
			t.Errorf("%s: logged %q, want %q", config, got, want)
		}
	}
}

// DecodeWithin does not report unknown keys outside the object "ipam".
func TestUnknownKeysWithin(t *testing.T) {
	got := decodeWarnings(t, func(r *Request, raw any) error { return r.DecodeWithin("ipam", raw) }, `{"bridg":"a","ipam":{"subnett":"x"}}`)
	if len(got) != 1 || !strings.Contains(got[0], "ipam.subnett") {
		t.Errorf("logged %q", got)
	}
}

func TestWrongTypes(t *testing.T) {
	r := newQuiet("ADD")
	for config, ok := range map[string]bool{`{"rate":1,"ipam":{"subnet":"x"}}`: true, `{"rate":"x"}`: false, `{"ipam":[]}`: false,
		`{"ipam":{"subnet":7}}`: false} {
		r.Config = []byte(config)
		var raw mirrorConf
		for _, err := range []error{r.Decode(&raw), r.DecodeWithin("ipam", &raw)} {
			if (err == nil) != ok || err != nil && Code(err) != CodeDecode {
				t.Errorf("%s: %v", config, err)
			}
		}
		if ok && (raw.Rate != 1 || raw.IPAM.Subnet != "x") {
			t.Errorf("%s: decoded %+v", config, raw)
		}
	}
}

func TestBadJSON(t *testing.T) {
	for _, config := range []string{"", " ", "[]", "null", "\x00", "1", `"x"`, "{", `{"cniVersion":1}`, `{"name":[]}`, "NaN", "\ufeff{}",
		`{"a":}`,
		`{"cniVersion":"1.1.0","name":"net"}{}`, strings.Repeat(`{"a":`, 20000), `{"a":"` + strings.Repeat("x", maxConfig) + `"}`} {
		rec := &recorder{}
		f := run(rec.plugin(), newEnv("DEL"), config).mustFail(t, CodeDecode)
		if strings.ContainsFunc(f.Msg, unprintable) || len(f.Msg) > 1000 || len(rec.requests) > 0 {
			t.Errorf("%.40q: %+v, %d calls", config, f, len(rec.requests))
		}
	}
}
