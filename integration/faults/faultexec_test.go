// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
)

// faultExec starts the plugins of a chain, and runs a shell command at one point of their execution: at a kernel or file change, or between
// two (see package fault). Points are numbered across all plugins of the chain.
type faultExec struct {
	invoke.DefaultExec
	at  int    // 0: count the moments only
	run string // shell command; its parent $PPID is the plugin
	dir string

	points  int
	ended   []int // number of moments of each plugin of the chain
	reached bool
	where   string
}

// killCommand returns the shell command that sends a signal: with the policy "self" to the child that the plugin waits for, or to the
// plugin if there is none; with "root" to the plugin; with "all" to both.
func killCommand(policy string, signal syscall.Signal) string {
	return fmt.Sprintf("kill -%d ", signal) + map[string]string{"self": "${CHILD:-$PPID}", "root": "$PPID", "all": "$CHILD $PPID"}[policy]
}

// ExecPlugin implements invoke.Exec.
func (e *faultExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	trace := filepath.Join(e.dir, "moments")
	cmd := exec.CommandContext(ctx, filepath.Join(harness.FaultDir(), filepath.Base(path)))
	var stdout, stderr bytes.Buffer
	cmd.Env = append(environ, "PODLACE_FAULT_MOMENTS="+trace, fmt.Sprintf("PODLACE_RUN_AT=%d %s", e.at-e.points, e.run))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	runErr := cmd.Run()
	moments, err := takeMoments(trace)
	if err != nil {
		return nil, err
	}
	if at := e.at - e.points; at > 0 && at <= len(moments) {
		e.reached = true
		e.where = fmt.Sprintf("%s in %s", moments[at-1], filepath.Base(path))
	}
	e.points += len(moments)
	e.ended = append(e.ended, e.points)
	if runErr == nil {
		return stdout.Bytes(), nil
	}
	failed := &types.Error{Msg: fmt.Sprintf("%v: %s", runErr, stderr.String())}
	if stdout.Len() > 0 {
		_ = json.Unmarshal(stdout.Bytes(), failed) // a truncated document leaves the exit status
	}
	return nil, failed
}

// takeMoments reads and removes a plugin's list of the points that it passed.
func takeMoments(file string) (moments []string, err error) {
	b, err := os.ReadFile(file)
	if err = errors.Join(err, os.Remove(file)); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for line := range strings.Lines(string(b)) {
		_, op, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if strings.HasPrefix(op, "COMMAND FAILED") {
			return nil, errors.New(op)
		}
		moments = append(moments, op)
	}
	return moments, err
}
