// SPDX-License-Identifier: Apache-2.0

package harness

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
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// CallLimit is far more than any verb takes. A plugin that hangs fails only its own test.
const CallLimit = 60 * time.Second

// PodArgs is the value of CNI_ARGS in all table-driven tests.
const PodArgs = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"

// Call is one call of a plugin. Environment variables with the value "" are not passed.
type Call struct {
	Plugin string
	Env    map[string]string
	Stdin  []byte
	Reader io.Reader    // instead of stdin
	In     *sandbox.Pod // the namespace in which the plugin starts; nil for the host
	Stdout io.Writer    // instead of Outcome.Stdout
}

// Outcome is the exit status and output of a call.
type Outcome struct {
	Call
	Exit   int
	Stdout string
	Stderr string

	PeakMemory int64 // in bytes, and at least what the test process held at the start
	CPU        time.Duration
}

// NewCall returns a call with the complete environment of a verb on the interface eth0.
func NewCall(verb, plugin string, pod *sandbox.Pod, id string, conf any) Call {
	c := Call{Plugin: plugin, Stdin: Encode(conf), Env: map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_PATH": BinDir(), "CNI_ARGS": PodArgs,
	}}
	if pod != nil {
		c.Env["CNI_NETNS"] = pod.Path
	}
	if plugin == "loopback" {
		c.Env["CNI_IFNAME"] = "lo"
	}
	return c
}

// With returns a copy of the call with other environment variables, given as pairs of name and value.
func (c Call) With(pairs ...string) Call {
	c.Env = maps.Clone(c.Env)
	for p := range slices.Chunk(pairs, 2) {
		c.Env[p[0]] = p[1]
	}
	return c
}

// Verb returns CNI_COMMAND.
func (c Call) Verb() string { return c.Env["CNI_COMMAND"] }

// Run fails the test if the plugin cannot start or does not end in time.
func (c Call) Run(t testing.TB) Outcome {
	t.Helper()
	o, err := c.Start()
	if err != nil {
		t.Fatalf("%s %s: %v", c.Plugin, c.Verb(), err)
	}
	return o
}

// Start runs the call. A failure of the plugin is no error, but in Outcome.Exit.
func (c Call) Start() (Outcome, error) {
	ctx, cancel := context.WithTimeout(context.Background(), CallLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(BinDir(), c.Plugin))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for k, v := range c.Env {
		if v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(c.Stdin), &stdout, &stderr
	if c.Reader != nil {
		cmd.Stdin = c.Reader
	}
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	err := Enter(c.In, cmd.Run)
	if exit := new(exec.ExitError); errors.As(err, &exit) && ctx.Err() == nil {
		err = nil
	}
	o := Outcome{Call: c, Stdout: stdout.String(), Stderr: stderr.String()}
	if cmd.ProcessState != nil {
		o.Exit = cmd.ProcessState.ExitCode()
		usage, _ := cmd.ProcessState.SysUsage().(*syscall.Rusage)
		o.PeakMemory, o.CPU = usage.Maxrss<<10, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()
	}
	return o, err
}

// Enter calls f in the namespace of a pod or of the host.
func Enter(pod *sandbox.Pod, f func() error) error {
	if pod == nil {
		return f()
	}
	return pod.Do(f)
}

// OK fails the test if the plugin failed or its output is not what the CNI specification permits for the verb.
func (o Outcome) OK(t testing.TB) Outcome {
	t.Helper()
	if o.Exit != 0 {
		t.Fatalf("%s: exit %d: %s%s", o.title(), o.Exit, o.Stdout, o.Stderr)
	}
	switch o.Verb() {
	case "ADD", "VERSION":
		OneDocument(t, o.Stdout, &json.RawMessage{})
	default:
		if o.Stdout != "" {
			t.Errorf("%s: stdout is %q, want nothing", o.title(), o.Stdout)
		}
	}
	return o
}

func (o Outcome) title() string { return o.Plugin + " " + o.Verb() }

// Failure is the error document of the CNI specification.
type Failure struct {
	CNIVersion string `json:"cniVersion"`
	Code       int    `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// Refused fails the test unless the plugin failed with exactly one error document on stdout, with one of the given codes, a version, a
// message of limited size, and the pod's name.
func (o Outcome) Refused(t testing.TB, codes ...int) Failure {
	t.Helper()
	if o.Exit != 1 {
		t.Fatalf("%s: exit %d, want 1 (stdout %q stderr %q)", o.title(), o.Exit, o.Stdout, o.Stderr)
	}
	var f Failure
	OneDocument(t, o.Stdout, &f)
	if !slices.Contains(codes, f.Code) {
		t.Errorf("%s: code %d, want %v: %s", o.title(), f.Code, codes, f.Msg)
	}
	if want := o.supportedVersion(); f.CNIVersion == "" || want != "" && f.CNIVersion != want {
		t.Errorf("%s: cniVersion is %q, want %q: %s", o.title(), f.CNIVersion, want, o.Stdout)
	}
	o.checkText(t, f)
	return f
}

var partName = regexp.MustCompile(`^(podlace-pod) \(\w+\)`)

// supportedVersion returns the configuration's cniVersion, or "" if the plugin does not support it.
func (o Outcome) supportedVersion() string {
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	i := slices.Index(AllVersions(), OldestOf(o.Plugin))
	if json.Unmarshal(o.Stdin, &conf) != nil || !slices.Contains(AllVersions()[i:], conf.CNIVersion) {
		return ""
	}
	return conf.CNIVersion
}

func (o Outcome) checkText(t testing.TB, f Failure) {
	t.Helper()
	prefix := o.Plugin + " " + strings.ToLower(o.Verb()) + ": "
	if !strings.HasPrefix(partName.ReplaceAllString(f.Msg, "$1"), prefix) || len(f.Msg) <= len(prefix) || len(f.Msg) > 1024 {
		t.Errorf("%s: msg %q: want at most 1 KiB beginning with %q", o.title(), f.Msg, prefix)
	}
	if o.Env["CNI_ARGS"] == PodArgs && !strings.Contains(f.Details, "pod=shop/web-0") {
		t.Errorf("%s: details %q do not name the pod shop/web-0", o.title(), f.Details)
	}
	if i := strings.IndexFunc(f.Msg+f.Details, func(c rune) bool { return !unicode.IsPrint(c) }); i >= 0 {
		t.Errorf("%s: unprintable character in %q %q", o.title(), f.Msg, f.Details)
	}
	if o.Verb() == "DEL" && (strings.Contains(f.Msg, "not found") || strings.Contains(f.Msg, "no such file")) {
		t.Errorf("%s: runtimes take %q for success", o.title(), f.Msg)
	}
	if strings.Contains(o.Stderr, `"code"`) {
		t.Errorf("%s: an error document on stderr: %s", o.title(), o.Stderr)
	}
}

// OneDocument decodes a text that must be exactly one JSON document. Unknown keys fail the test.
func OneDocument(t testing.TB, text string, into any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatalf("stdout %q: %v", text, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		t.Fatalf("stdout has more than one document: %q", text)
	}
}

// Object is a JSON object that tests can edit.
type Object map[string]any

// Encode renders a configuration as JSON, but returns bytes and strings unchanged.
func Encode(v any) []byte {
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

// With returns a deep copy with replaced values, given as pairs of a dotted path and a value. A nil value removes the key. The dot in a
// reserved key such as cni.dev/x does not split it.
func (o Object) With(pairs ...any) Object {
	out := Object{}
	d := json.NewDecoder(bytes.NewReader(Encode(o)))
	d.UseNumber() // a float64 cannot hold 2^64-1
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

// RawObject decodes a plugin's result for use in a configuration.
func RawObject(t testing.TB, text string) Object {
	t.Helper()
	var o Object
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return o
}
