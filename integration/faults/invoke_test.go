// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

type object = harness.Object

type chainStep struct {
	plugin string
	conf   object
}

type pluginCall struct {
	chainStep
	verb string
	pod  *sandbox.Pod
	prev json.RawMessage
}

// callOutcome is the output of a plugin call with its kernel and file changes in order. moments are the points at which a test can kill the
// plugin: each change, and points between two.
type callOutcome struct {
	exit    int
	stdout  []byte
	changes []string
	moments []string
}

// runFailing lets change number failAt of the call fail; 0 means none.
func (c pluginCall) runFailing(t testing.TB, failAt int) callOutcome {
	t.Helper()
	return c.runWith(t, fmt.Sprint("PODLACE_FAIL_AT=", failAt))
}

// runWith calls the plugin with an environment variable that injects a fault. The exit code of a killed plugin is -1.
func (c pluginCall) runWith(t testing.TB, fault string) callOutcome {
	t.Helper()
	conf := c.conf
	switch {
	case c.verb == "GC":
		conf = conf.With("cni.dev/valid-attachments", []any{})
	case c.prev != nil:
		conf = conf.With("prevResult", c.prev)
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		t.Fatal(err)
	}
	trace := filepath.Join(t.TempDir(), "trace")
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(harness.FaultDir(), c.plugin))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	cmd.Env = []string{"CNI_COMMAND=" + c.verb, "CNI_CONTAINERID=" + c.pod.Name, "CNI_IFNAME=eth0", "CNI_NETNS=" + c.pod.Path,
		"CNI_PATH=" + harness.FaultDir(),
		"CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0", fault,
		"PODLACE_FAULT_TRACE=" + trace, "PODLACE_FAULT_MOMENTS=" + trace + ".moments"}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	o := callOutcome{exit: cmd.ProcessState.ExitCode(), stdout: stdout.Bytes(), changes: tracedLines(trace),
		moments: tracedLines(trace + ".moments")}
	if strings.Contains(stderr.String(), "goroutine ") {
		t.Errorf("%s %s: %s", c.plugin, c.verb, stderr.String())
	}
	return o
}

func tracedLines(file string) (ops []string) {
	text, _ := os.ReadFile(file) // the file does not exist if nothing was changed
	for line := range strings.Lines(string(text)) {
		_, op, _ := strings.Cut(strings.TrimSpace(line), " ")
		ops = append(ops, op)
	}
	return ops
}

// mustRun runs the call, which must succeed.
func (c pluginCall) mustRun(t testing.TB) callOutcome {
	t.Helper()
	o := c.runFailing(t, 0)
	if o.exit != 0 {
		t.Fatalf("%s %s: exit %d: %s", c.plugin, c.verb, o.exit, o.stdout)
	}
	return o
}

// checkRefused checks that the call printed one error document, and that it contains the fault.
func (o callOutcome) checkRefused(t testing.TB, c pluginCall, failAt int) {
	t.Helper()
	var doc struct {
		CNIVersion string `json:"cniVersion"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
		Details    string `json:"details"`
	}
	dec := json.NewDecoder(bytes.NewReader(o.stdout))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&doc); err != nil {
		t.Errorf("%v in %q", err, o.stdout)
		return
	}
	if _, err := dec.Token(); err != io.EOF {
		t.Errorf("more than one document: %s", o.stdout)
	}
	if o.exit != 1 || doc.Code == 0 || doc.Code == 999 || doc.CNIVersion != "1.1.0" ||
		!strings.Contains(doc.Msg, fmt.Sprintf("injected fault at change %d ", failAt)) {
		t.Errorf("exit %d, %+v", o.exit, doc)
	}
	if c.verb != "GC" && !strings.Contains(doc.Details, "pod=shop/web-0 container="+c.pod.Name) {
		t.Errorf("the details do not name the pod: %q", doc.Details)
	}
	if all := doc.Msg + doc.Details; c.verb == "DEL" && (strings.Contains(all, "not found") || strings.Contains(all, "no such file")) {
		t.Errorf("go-cni reads %q as success", all)
	}
}
