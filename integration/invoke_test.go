// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/podlace/podlace/pkg/sandbox"
)

// callLimit is far above what any verb needs, so that a hang fails a test by name.
const callLimit = 20 * time.Second

// podArgs names the pod that every call of the tables is about.
const podArgs = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"

// call is one start of a plugin. A variable whose value is "" is not set.
type call struct {
	plugin string
	env    map[string]string
	stdin  []byte
	reader io.Reader    // instead of stdin
	in     *sandbox.Pod // the namespace to start in; nil for the host
	stdout io.Writer    // instead of outcome.stdout
}

// outcome is what came back.
type outcome struct {
	call
	exit   int
	stdout string
	stderr string
}

// newCall has the complete environment of a verb on the interface eth0.
func newCall(verb, plugin string, pod *sandbox.Pod, id string, conf any) call {
	c := call{plugin: plugin, stdin: encode(conf), env: map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_PATH": binDir(), "CNI_ARGS": podArgs,
	}}
	if pod != nil {
		c.env["CNI_NETNS"] = pod.Path
	}
	if plugin == "loopback" {
		c.env["CNI_IFNAME"] = "lo"
	}
	return c
}

// with returns a copy of the call with variables replaced, given as name, value, ...
func (c call) with(pairs ...string) call {
	c.env = maps.Clone(c.env)
	for p := range slices.Chunk(pairs, 2) {
		c.env[p[0]] = p[1]
	}
	return c
}

func (c call) verb() string { return c.env["CNI_COMMAND"] }

func (c call) run(t testing.TB) outcome {
	t.Helper()
	o, err := c.start()
	if err != nil {
		t.Fatalf("%s %s: %v", c.plugin, c.verb(), err)
	}
	return o
}

func (c call) start() (outcome, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(binDir(), c.plugin))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for k, v := range c.env {
		if v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(c.stdin), &stdout, &stderr
	if c.reader != nil {
		cmd.Stdin = c.reader
	}
	if c.stdout != nil {
		cmd.Stdout = c.stdout
	}
	err := enter(c.in, cmd.Run)
	if exit := new(exec.ExitError); errors.As(err, &exit) && ctx.Err() == nil {
		err = nil
	}
	o := outcome{call: c, stdout: stdout.String(), stderr: stderr.String()}
	if cmd.ProcessState != nil {
		o.exit = cmd.ProcessState.ExitCode()
	}
	return o, err
}

// enter calls f in the namespace of a pod, or of the host.
func enter(pod *sandbox.Pod, f func() error) error {
	if pod == nil {
		return f()
	}
	return pod.Do(f)
}

// ok demands success, and on stdout what the verb allows there.
func (o outcome) ok(t testing.TB) outcome {
	t.Helper()
	if o.exit != 0 {
		t.Fatalf("%s: exit %d: %s%s", o.title(), o.exit, o.stdout, o.stderr)
	}
	switch o.verb() {
	case "ADD", "VERSION":
		oneDocument(t, o.stdout, &json.RawMessage{})
	default:
		if o.stdout != "" {
			t.Errorf("%s: stdout is %q, want nothing", o.title(), o.stdout)
		}
	}
	return o
}

func (o outcome) title() string { return o.plugin + " " + o.verb() }

// failure is the error document of the specification.
type failure struct {
	CNIVersion string `json:"cniVersion"`
	Code       int    `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// refused demands an error that is complete: one document on stdout with one of
// the codes, with a version, a message of decent size and the name of the pod.
func (o outcome) refused(t testing.TB, codes ...int) failure {
	t.Helper()
	if o.exit != 1 {
		t.Fatalf("%s: exit %d, want 1 (stdout %q stderr %q)", o.title(), o.exit, o.stdout, o.stderr)
	}
	var f failure
	oneDocument(t, o.stdout, &f)
	if !slices.Contains(codes, f.Code) {
		t.Errorf("%s: code %d, want %v: %s", o.title(), f.Code, codes, f.Msg)
	}
	if want := o.version(); f.CNIVersion == "" || want != "" && f.CNIVersion != want {
		t.Errorf("%s: cniVersion is %q, want %q: %s", o.title(), f.CNIVersion, want, o.stdout)
	}
	o.checkText(t, f)
	return f
}

// version is the one that the configuration asks for, if the plugin has it.
func (o outcome) version() string {
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	i := slices.Index(allVersions(), oldestOf(o.plugin))
	if json.Unmarshal(o.stdin, &conf) != nil || !slices.Contains(allVersions()[i:], conf.CNIVersion) {
		return ""
	}
	return conf.CNIVersion
}

func (o outcome) checkText(t testing.TB, f failure) {
	t.Helper()
	prefix := o.plugin + " " + strings.ToLower(o.verb()) + ": "
	if !strings.HasPrefix(f.Msg, prefix) || len(f.Msg) <= len(prefix) || len(f.Msg) > 1024 {
		t.Errorf("%s: msg %q: want at most 1 KiB beginning with %q", o.title(), f.Msg, prefix)
	}
	if o.env["CNI_ARGS"] == podArgs && !strings.Contains(f.Details, "pod=shop/web-0") {
		t.Errorf("%s: details %q do not name the pod shop/web-0", o.title(), f.Details)
	}
	if i := strings.IndexFunc(f.Msg+f.Details, func(c rune) bool { return !unicode.IsPrint(c) }); i >= 0 {
		t.Errorf("%s: unprintable character in %q %q", o.title(), f.Msg, f.Details)
	}
	if o.verb() == "DEL" && (strings.Contains(f.Msg, "not found") || strings.Contains(f.Msg, "no such file")) {
		t.Errorf("%s: %q would be read as success", o.title(), f.Msg)
	}
	if strings.Contains(o.stderr, `"code"`) {
		t.Errorf("%s: an error document on stderr: %s", o.title(), o.stderr)
	}
}

// oneDocument decodes exactly one JSON document, without keys that the target does not have.
func oneDocument(t testing.TB, text string, into any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatalf("stdout %q: %v", text, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		t.Fatalf("stdout holds more than one document: %q", text)
	}
}

// object is a JSON object that tests edit.
type object map[string]any

// encode renders a configuration; bytes and strings go as they are.
func encode(v any) []byte {
	switch v := v.(type) {
	case nil:
		return nil
	case []byte:
		return v
	case string:
		return []byte(v)
	}
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// with returns a deep copy with values at dotted paths replaced, given as path,
// value, ...; a nil value removes the key. Reserved keys as in cni.dev/x are one
// step, not two.
func (o object) with(pairs ...any) object {
	out := object{}
	d := json.NewDecoder(bytes.NewReader(encode(o)))
	d.UseNumber() // 2^64-1 is no float64
	if err := d.Decode(&out); err != nil {
		panic(err)
	}
	for p := range slices.Chunk(pairs, 2) {
		at := map[string]any(out)
		path := strings.Split(p[0].(string), ".")
		if strings.HasPrefix(p[0].(string), "cni.dev/") {
			path = []string{p[0].(string)}
		}
		for _, key := range path[:len(path)-1] {
			next, ok := at[key].(map[string]any)
			if !ok {
				next = map[string]any{}
				at[key] = next
			}
			at = next
		}
		if p[1] == nil {
			delete(at, path[len(path)-1])
			continue
		}
		at[path[len(path)-1]] = p[1]
	}
	return out
}

// rawObject decodes a result to put it into a configuration.
func rawObject(t testing.TB, text string) object {
	t.Helper()
	var o object
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return o
}
