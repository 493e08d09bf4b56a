// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// wrapExec starts one plugin of a chain through a wrapper program, and starts the other plugins directly.
type wrapExec struct {
	invoke.DefaultExec
	plugin string
	wrap   []string
	ran    bool
}

// ExecPlugin starts one plugin for libcni.
func (e *wrapExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	argv := []string{path}
	if filepath.Base(path) == e.plugin {
		argv = append(append([]string{}, e.wrap...), path)
		e.ran = true
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	runErr := cmd.Run()
	if runErr == nil {
		return stdout.Bytes(), nil
	}
	failed := &types.Error{Msg: fmt.Sprintf("%v: %s", runErr, stderr.String())}
	if stdout.Len() > 0 {
		_ = json.Unmarshal(stdout.Bytes(), failed) // a truncated document leaves the exit status
	}
	return nil, failed
}

// doWrapped runs a verb of the chain and starts one plugin through a wrapper program.
func (s *killSweep) doWrapped(verb, plugin string, rt *libcni.RuntimeConf, wrap ...string) error {
	e := &wrapExec{plugin: plugin, wrap: wrap}
	n, err := harness.OpenNetwork(s.conflist, s.cacheDir, e)
	if err == nil {
		_, err = n.Do(verb, rt, nil)
	}
	if !e.ran && err == nil {
		err = fmt.Errorf("%s was not started", plugin)
	}
	return err
}

// callFailures returns for each system call the errors that can occur on a broken node.
func callFailures() map[string][]string {
	return map[string][]string{
		"openat": {"EMFILE", "ENFILE", "EIO", "EACCES"}, "read": {"EIO", "EINTR"}, "write": {"EIO", "ENOSPC", "EINTR"},
		"linkat": {"EIO", "EDQUOT"}, "renameat": {"EIO", "ENOSPC"}, "unlinkat": {"EIO", "EBUSY"}, "mkdirat": {"ENOSPC"},
		"getdents64": {"EIO"}, "fcntl": {"ENOLCK", "EINTR"}, "flock": {"ENOLCK", "EINTR"},
		"socket": {"EMFILE", "ENOMEM"}, "bind": {"ENOMEM"}, "sendto": {"ENOBUFS", "EINTR"}, "sendmsg": {"ENOBUFS", "EINTR"},
		"recvfrom": {"ENOBUFS", "EINTR"}, "recvmsg": {"ENOMEM", "EINTR"}, "setns": {"ENOMEM", "EPERM"}, "statfs,fstatfs": {"EIO"},
	}
}

// killedCalls returns the system calls that change the node, take or release a lock, or write the result. At each of these system calls,
// the test sends SIGKILL to the program.
func killedCalls() map[string][]string {
	kills := map[string][]string{}
	for _, call := range []string{"openat", "write", "pwrite64", "linkat", "renameat", "unlinkat", "mkdirat", "utimensat", "fcntl", "flock",
		"sendto", "sendmsg", "setns", "exit_group"} {
		kills[call] = []string{sigkill}
	}
	return kills
}

// The constant `sigkill` takes the place of an error name such as EIO. With this name, strace kills the program at the system call.
const sigkill = "SIGKILL"

// TestFaultAddCalls lets a single system call of ADD fail.
func TestFaultAddCalls(t *testing.T) {
	t.Run("F-11 any system call of ADD fails", func(t *testing.T) { failCalls(t, "ADD", callFailures(), 17, 4) })
}

// TestFaultDelCalls lets a single system call of DEL fail.
func TestFaultDelCalls(t *testing.T) {
	t.Run("F-11 any system call of DEL fails", func(t *testing.T) { failCalls(t, "DEL", callFailures(), 17, 4) })
}

// TestFaultKilledCalls kills a plugin at a system call.
func TestFaultKilledCalls(t *testing.T) {
	t.Run("F-01 SIGKILL at any system call of ADD", func(t *testing.T) { failCalls(t, "ADD", killedCalls(), 9, 1) })
	t.Run("F-02 SIGKILL at any system call of DEL", func(t *testing.T) { failCalls(t, "DEL", killedCalls(), 9, 1) })
}

// failCalls tests every n-th kind of failure, where n is the argument `one`. A kind of failure is a plugin, a system call and an error. The
// argument `first` is the number of the first system call that fails. With FAULTS=all, failCalls tests all kinds of failure and all system
// calls.
func failCalls(t *testing.T, verb string, how map[string][]string, one, first int) {
	t.Helper()
	strace := harness.Program(t, "strace")
	s := newSweep(t, "nftables")
	kinds := 0
	for _, plugin := range harness.ChainPlugins() {
		for call, errnos := range harness.InOrder(how) {
			for _, errno := range errnos {
				if kinds++; kinds%harness.Some(one, 1) == 0 {
					s.failCall(t, verb, plugin, call, errno, strace, harness.Some(first, 1))
				}
			}
		}
	}
	s.Report(t)
}

// failCall runs the verb once for each system call with the given name, and lets this system call fail. failCall ends when the plugin makes
// no further system call with this name. Without FAULTS=all, failCall tests only some of these system calls.
func (s *killSweep) failCall(t *testing.T, verb, plugin, call, errno, strace string, first int) {
	t.Helper()
	trace := filepath.Join(s.dir, "strace")
	step := harness.Some(27, 1)
	if call == "recvmsg" && errno == "EINTR" {
		step = max(step, 9) // each case lasts until the deadline for an answer
	}
	for when := first; when < 1000; when += step {
		injected := true
		title := fmt.Sprintf("%s of %s: %s number %d: %s", verb, plugin, call, when, errno)
		s.tryCase(t, title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if verb == "DEL" {
				if _, err := s.Do("ADD", rt, nil); err != nil {
					return fmt.Errorf("ADD before: %w", err)
				}
			}
			fault := "error=" + errno
			if errno == sigkill {
				fault = "signal=" + errno
			}
			err := s.doWrapped(verb, plugin, rt, strace, "-f", "-q", "-y", "-o", trace, "-e", "trace="+call,
				"-e", fmt.Sprintf("inject=%s:%s:when=%d", call, fault, when))
			log, _ := os.ReadFile(trace)
			hits := failedCalls(string(log))
			injected = len(hits) > 0
			switch {
			case slices.ContainsFunc(hits, preventsAnswer) || injected && errno == sigkill:
				err = nil
			case err == nil && verb == "ADD":
				_, err = s.Do("CHECK", rt, nil)
			default:
				err = harness.Coded(err)
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", strings.Join(hits, "\n"), err)
			}
			_, del := s.Do("DEL", rt, nil)
			return errors.Join(err, del)
		})
		if !injected {
			s.Points-- // no call failed
			return
		}
	}
}

// failedCalls returns the lines about failed system calls from the output of strace, and the line of each killed thread. If strace prints a
// call in two lines, failedCalls joins the lines, because the second line ("<... write resumed>") contains no file name.
func failedCalls(log string) (hits []string) {
	began := map[string]string{}
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		process, _, _ := strings.Cut(line, " ")
		switch {
		case strings.Contains(line, "+++ killed by SIGKILL"):
			hits = append(hits, line)
		case !strings.Contains(line, "(INJECTED)"):
			began[process] = line
		case strings.Contains(line, " resumed>"):
			hits = append(hits, began[process]+line)
		default:
			hits = append(hits, line)
		}
	}
	return hits
}

// preventsAnswer reports whether a failed system call prevents the plugin from printing a result or an error. Such a system call writes to
// stdout, prepares the standard streams of the Go runtime, or wakes a thread of the Go runtime.
func preventsAnswer(line string) bool {
	return strings.Contains(line, " write(1<") || strings.Contains(line, "F_GETFD") || strings.Contains(line, "anon_inode:[event")
}

// TestFaultLimits starts the plugins with too little memory, too few file descriptors or too few capabilities.
func TestFaultLimits(t *testing.T) {
	plugins := harness.ChainPlugins()
	t.Run("F-45 few file descriptors", func(t *testing.T) {
		s := newSweep(t, "nftables")
		for _, plugin := range plugins {
			for n := 3; n < 24; n += harness.Some(9, 1) {
				// With fewer than 8 file descriptors, the Go runtime cannot create its poller, and exits without a result or an error of
				// the plugin.
				s.addLimited(t, plugin, n >= 8, "/bin/sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0"`, n))
			}
		}
		s.Report(t)
	})
	t.Run("F-45 little memory", func(t *testing.T) {
		s := newSweep(t, "nftables")
		for _, plugin := range plugins {
			for kib := 2000; kib < 2_000_000; kib += kib*harness.Some(24, 1)/8 + 1 {
				// Without enough memory, the Go runtime exits without a result or an error of the plugin.
				s.addLimited(t, plugin, false, "/bin/sh", "-c", fmt.Sprintf(`ulimit -v %d; exec "$0"`, kib))
			}
		}
		s.Report(t)
	})
	t.Run("F-45 no capabilities", func(t *testing.T) {
		setpriv := harness.Program(t, "setpriv")
		s := newSweep(t, "nftables")
		for _, plugin := range plugins {
			for _, less := range []string{"-net_admin", "-sys_admin", "-dac_override", "-all"} {
				s.addLimited(t, plugin, true, setpriv, "--inh-caps="+less, "--bounding-set="+less)
			}
		}
		s.Report(t)
	})
}

// addLimited runs ADD of a plugin under a resource limit. If the argument `answers` is true, ADD must return a result or an error with a
// code. After ADD, a DEL without the resource limit must remove all state.
func (s *killSweep) addLimited(t *testing.T, plugin string, answers bool, wrap ...string) {
	t.Helper()
	s.tryCase(t, plugin+" under "+strings.Join(wrap, " "), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		err := s.doWrapped("ADD", plugin, rt, wrap...)
		if err == nil {
			_, err = s.Do("CHECK", rt, nil)
		} else if answers {
			err = harness.Coded(err)
		} else {
			err = nil
		}
		_, del := s.Do("DEL", rt, nil)
		return errors.Join(err, del)
	})
}
