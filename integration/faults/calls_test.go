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

// wrapExec starts one plugin of a chain through a wrapper program, and the others directly.
type wrapExec struct {
	invoke.DefaultExec
	plugin string
	wrap   []string
	ran    bool
}

// ExecPlugin implements invoke.Exec.
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

// callFailures maps system calls to the errors that they can return on a broken node.
func callFailures() map[string][]string {
	return map[string][]string{
		"openat": {"EMFILE", "ENFILE", "EIO", "EACCES"}, "read": {"EIO", "EINTR"}, "write": {"EIO", "ENOSPC", "EINTR"},
		"linkat": {"EIO", "EDQUOT"}, "renameat": {"EIO", "ENOSPC"}, "unlinkat": {"EIO", "EBUSY"}, "mkdirat": {"ENOSPC"},
		"getdents64": {"EIO"}, "fcntl": {"ENOLCK", "EINTR"}, "flock": {"ENOLCK", "EINTR"},
		"socket": {"EMFILE", "ENOMEM"}, "bind": {"ENOMEM"}, "sendto": {"ENOBUFS", "EINTR"}, "sendmsg": {"ENOBUFS", "EINTR"},
		"recvfrom": {"ENOBUFS", "EINTR"}, "recvmsg": {"ENOMEM", "EINTR"}, "setns": {"ENOMEM", "EPERM"}, "statfs,fstatfs": {"EIO"},
	}
}

// killedCalls are the system calls at which the program gets SIGKILL: those that change the node, take or release a lock, or write the
// result.
func killedCalls() map[string][]string {
	kills := map[string][]string{}
	for _, call := range []string{"openat", "write", "pwrite64", "linkat", "renameat", "unlinkat", "mkdirat", "utimensat", "fcntl", "flock",
		"sendto", "sendmsg", "setns", "exit_group"} {
		kills[call] = []string{sigkill}
	}
	return kills
}

// sigkill stands in place of an error such as EIO, and makes strace kill the program.
const sigkill = "SIGKILL"

func TestFaultAddCalls(t *testing.T) {
	t.Run("F-11 any system call of ADD fails", func(t *testing.T) { failCalls(t, "ADD", callFailures(), 17, 4) })
}

func TestFaultDelCalls(t *testing.T) {
	t.Run("F-11 any system call of DEL fails", func(t *testing.T) { failCalls(t, "DEL", callFailures(), 17, 4) })
}

func TestFaultKilledCalls(t *testing.T) {
	t.Run("F-01 SIGKILL at any system call of ADD", func(t *testing.T) { failCalls(t, "ADD", killedCalls(), 9, 1) })
	t.Run("F-02 SIGKILL at any system call of DEL", func(t *testing.T) { failCalls(t, "DEL", killedCalls(), 9, 1) })
}

// failCalls tests every n-th kind of failure, with n = one; a kind is a plugin, a system call and an error. first is the number of the
// first call that fails. With FAULTS=all, it tests all kinds and all calls.
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

// failCall lets one system call of a name fail in each run of the verb, until the plugin makes no further one. Without FAULTS=all, it tests
// only some.
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

// failedCalls returns strace's lines about failed calls and killed threads. It joins a call in two lines, because the second ("<... write
// resumed>") has no file name.
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

// preventsAnswer reports whether the failed call keeps the plugin from printing a result or error: a write to stdout, or one with which the
// Go runtime prepares the standard streams or wakes a thread.
func preventsAnswer(line string) bool {
	return strings.Contains(line, " write(1<") || strings.Contains(line, "F_GETFD") || strings.Contains(line, "anon_inode:[event")
}

// TestFaultLimits starts the plugins with too little memory and too few file descriptors or capabilities.
func TestFaultLimits(t *testing.T) {
	plugins := harness.ChainPlugins()
	t.Run("F-45 few file descriptors", func(t *testing.T) {
		s := newSweep(t, "nftables")
		for _, plugin := range plugins {
			for n := 3; n < 24; n += harness.Some(9, 1) {
				// With fewer than 8 file descriptors, the Go runtime cannot create its poller and exits without an answer of the plugin.
				s.addLimited(t, plugin, n >= 8, "/bin/sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0"`, n))
			}
		}
		s.Report(t)
	})
	t.Run("F-45 little memory", func(t *testing.T) {
		s := newSweep(t, "nftables")
		for _, plugin := range plugins {
			for kib := 2000; kib < 2_000_000; kib += kib*harness.Some(24, 1)/8 + 1 {
				// Without enough memory, the Go runtime exits without an answer of the plugin.
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

// addLimited runs ADD of a plugin under a resource limit. If answers is set, ADD must print a result or an error with a code. A DEL without
// the limit must then remove all state.
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
