// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Lab holds a plugin, its configuration and a pod. Tests use a Lab to call the plugin for the pod's interface eth0.
type Lab struct {
	*testing.T
	Plugin func(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) (exit int)
	Conf   Object
	Pod    *sandbox.Pod
	Env    map[string]string // variables that are added to the environment of Request or replace its variables
	Stderr io.Writer         // receives a copy of the log during a call; may be nil
}

// Outcome is the output of one plugin call: exit code, result or error, and log.
type Outcome struct {
	Exit    int
	Stdout  []byte
	Log     string
	Failure struct {
		Code    uint   `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details"`
	}
}

// Call runs a CNI command, such as ADD, for a container. Further arguments are pairs of a configuration key, or of an environment variable
// that begins with CNI_, and its value.
func (l Lab) Call(verb, id string, keys ...any) Outcome {
	l.Helper()
	env, stdin := l.Request(verb, id, keys...)
	return l.Send(env, stdin)
}

// Request returns the environment and the configuration that Call passes to the plugin.
func (l Lab) Request(verb, id string, keys ...any) (env map[string]string, stdin []byte) {
	l.Helper()
	env = map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_NETNS": l.Pod.Path, "CNI_PATH": "/nonexistent",
	}
	maps.Copy(env, l.Env)
	stdin, err := json.Marshal(l.Conf.Call(env, keys...))
	if err != nil {
		l.Fatal(err)
	}
	return env, stdin
}

// Send runs the plugin with an environment and a configuration.
func (l Lab) Send(env map[string]string, stdin []byte) Outcome {
	l.Helper()
	var stdout, log bytes.Buffer
	var stderr io.Writer = &log
	if l.Stderr != nil {
		stderr = io.MultiWriter(&log, l.Stderr)
	}
	exit := l.Plugin(func(name string) string { return env[name] }, bytes.NewReader(stdin), &stdout, stderr)
	return l.Outcome(env["CNI_COMMAND"], exit, stdout.Bytes(), log.String())
}

// Outcome parses a plugin's output. A DEL's error fails the test if go-cni takes its text for success.
func (l Lab) Outcome(verb string, exit int, stdout []byte, log string) Outcome {
	l.Helper()
	o := Outcome{Exit: exit, Stdout: stdout, Log: log}
	if err := json.Unmarshal(stdout, &o.Failure); err != nil && len(stdout) > 0 {
		l.Errorf("%s: %v in %s", verb, err, stdout)
	}
	text := strings.ToLower(string(stdout))
	if verb == "DEL" && (strings.Contains(text, "not found") || strings.Contains(text, "no such file")) {
		l.Errorf("go-cni reads %s as success", stdout)
	}
	return o
}

// OK fails the test if the plugin call did not succeed.
func (l Lab) OK(o Outcome) Outcome {
	l.Helper()
	if o.Exit != 0 {
		l.Fatalf("exit %d: %s\n%s", o.Exit, o.Stdout, o.Log)
	}
	return o
}

// Fails checks that the call failed with the given code, and that the error message contains the given text.
func (l Lab) Fails(o Outcome, code uint, says string) {
	l.Helper()
	if o.Exit != 1 || o.Failure.Code != code || !strings.Contains(o.Failure.Msg, says) {
		l.Errorf("exit %d, %s: want code %d and %q", o.Exit, o.Stdout, code, says)
	}
}
