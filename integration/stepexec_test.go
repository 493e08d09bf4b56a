// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
)

// stepExec starts the plugins of a chain under the stepper. Points are counted
// over the whole chain; the n-th is where the kill comes.
type stepExec struct {
	invoke.DefaultExec
	at     int // 0 counts only
	policy string
	signal syscall.Signal // 0 for SIGKILL
	run    string         // with policy "pause"
	dir    string

	points int
	ended  []int // points of each plugin of the chain
	killed bool
	where  string
}

// stepReport mirrors the report of the stepper.
type stepReport struct {
	Points  int    `json:"points"`
	Killed  bool   `json:"killed"`
	Output  string `json:"output"`
	Call    string `json:"call"`
	Process string `json:"process"`
	Exit    int    `json:"exit"`
}

// ExecPlugin starts one plugin for libcni.
func (e *stepExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	at := max(e.at-e.points, 0)
	if e.killed {
		at = 0
	}
	file := filepath.Join(e.dir, "report.json")
	cmd := exec.CommandContext(ctx, filepath.Join(os.Getenv(toolsEnv), "stepper"),
		"-at", fmt.Sprint(at), "-policy", e.policy, "-signal", fmt.Sprint(int(cmp.Or(e.signal, syscall.SIGKILL))),
		"-run", e.run, "-report", file, "--", path)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	runErr := cmd.Run()
	report, err := readReport(file)
	if err != nil {
		return nil, fmt.Errorf("stepper: %w: %s", err, stderr.String())
	}
	if report.Output != "" {
		return nil, fmt.Errorf("command at the point: %s", report.Output)
	}
	e.points += report.Points
	e.ended = append(e.ended, e.points)
	if report.Killed {
		e.killed = true
		e.where = fmt.Sprintf("%s of %s in %s", report.Call, report.Process, filepath.Base(path))
	}
	if runErr == nil {
		return stdout.Bytes(), nil
	}
	failed := &types.Error{Msg: fmt.Sprintf("exit %d: %s", report.Exit, stderr.String())}
	if stdout.Len() > 0 {
		_ = json.Unmarshal(stdout.Bytes(), failed) // a torn document leaves the exit status
	}
	return nil, failed
}

func readReport(file string) (stepReport, error) {
	var r stepReport
	b, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	_ = os.Remove(file)
	return r, json.Unmarshal(b, &r)
}
