// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// allVersions returns all versions of the CNI specification.
func allVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// environ is the environment of a plugin call.
type environ map[string]string

func newEnv(verb string) environ {
	return environ{"CNI_COMMAND": verb, "CNI_CONTAINERID": "pod-1", "CNI_IFNAME": "eth0", "CNI_PATH": "/opt/cni/bin"}
}

// with returns a copy of the environment with changed variables, given as alternating names and values.
func (e environ) with(pairs ...string) environ {
	out := environ{}
	for k, v := range e {
		out[k] = v
	}
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = pairs[i+1]
	}
	return out
}

func (e environ) get(name string) string { return e[name] }

// callOutcome is the exit status and the output of a plugin call.
type callOutcome struct {
	exit           int
	stdout, stderr string
}

func run(p Plugin, e environ, stdin string) callOutcome {
	var stdout, stderr bytes.Buffer
	exit := p.Run(e.get, strings.NewReader(stdin), &stdout, &stderr)
	return callOutcome{exit, stdout.String(), stderr.String()}
}

// errorDocument is the error document of the CNI specification.
type errorDocument struct {
	CNIVersion string `json:"cniVersion"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// mustFail checks that the exit status is 1 and stdout exactly one error document with this code.
func (o callOutcome) mustFail(t *testing.T, code uint) errorDocument {
	t.Helper()
	var f errorDocument
	dec := json.NewDecoder(strings.NewReader(o.stdout))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil || o.exit != 1 {
		t.Fatalf("exit %d, %v, stdout %q: want 1 and an error document", o.exit, err, o.stdout)
	}
	if _, err := dec.Token(); err != io.EOF {
		t.Errorf("more than one document on stdout: %q", o.stdout)
	}
	if f.Code != code || f.CNIVersion == "" || f.Msg == "" {
		t.Errorf("got %+v: want code %d, a version and a message", f, code)
	}
	return f
}

// mustSucceed checks that the exit status is 0 and stdout exactly this text.
func (o callOutcome) mustSucceed(t *testing.T, stdout string) {
	t.Helper()
	if o.exit != 0 || o.stdout != stdout {
		t.Fatalf("exit %d, stdout %q: want 0 and %q", o.exit, o.stdout, stdout)
	}
}

// recorder stores the requests that its plugin receives.
type recorder struct{ requests []*Request }

func (rec *recorder) keep(r *Request) error {
	rec.requests = append(rec.requests, r)
	return nil
}

func (rec *recorder) plugin() Plugin {
	add := func(r *Request) (*types100.Result, error) { return &types100.Result{}, rec.keep(r) }
	return Plugin{Name: "recorder", Add: add, Del: rec.keep, Check: rec.keep, GC: rec.keep, Status: rec.keep}
}

func config(keys string) string {
	if keys != "" {
		keys = "," + keys
	}
	return `{"cniVersion":"1.1.0","name":"net","type":"recorder"` + keys + `}`
}
