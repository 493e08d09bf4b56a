// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// allVersions returns the versions of the specification.
func allVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// env is an environment. Verbs without a namespace need no sandbox.
type env map[string]string

func newEnv(verb string) env {
	return env{"CNI_COMMAND": verb, "CNI_CONTAINERID": "pod-1", "CNI_IFNAME": "eth0", "CNI_PATH": "/opt/cni/bin"}
}

// with returns a copy with pairs of names and values set.
func (e env) with(pairs ...string) env {
	out := env{}
	for k, v := range e {
		out[k] = v
	}
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = pairs[i+1]
	}
	return out
}

func (e env) get(name string) string { return e[name] }

// outcome is the result of a call from the runtime's point of view.
type outcome struct {
	exit           int
	stdout, stderr string
}

func run(p Plugin, e env, stdin string) outcome {
	var stdout, stderr bytes.Buffer
	exit := p.Run(e.get, strings.NewReader(stdin), &stdout, &stderr)
	return outcome{exit, stdout.String(), stderr.String()}
}

// failure is the specification's error document.
type failure struct {
	CNIVersion string `json:"cniVersion"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// refused expects exit status 1 and exactly one error document with the code.
func (o outcome) refused(t *testing.T, code uint) failure {
	t.Helper()
	var f failure
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

// ok expects exit status 0 and exactly this stdout.
func (o outcome) ok(t *testing.T, stdout string) {
	t.Helper()
	if o.exit != 0 || o.stdout != stdout {
		t.Fatalf("exit %d, stdout %q: want 0 and %q", o.exit, o.stdout, stdout)
	}
}

// recorder is a plugin that stores the requests that reach its verbs.
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
