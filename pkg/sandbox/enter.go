// SPDX-License-Identifier: Apache-2.0

// Package sandbox gives a program a network of its own to play with, and an
// oracle that says what the program changed in it.
//
// Enter re-executes the program in fresh user, mount, UTS and network namespaces,
// which works as root and as an ordinary user. NewPod makes further network
// namespaces as a container runtime does. Take and Diff compare everything
// that a CNI plugin may touch. The machine itself never sees any of it.
package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// mark is set for the re-executed process and holds the network namespace of
// its parent, so that a copy inherited by accident is told from a real one.
const mark = "PODLACE_SANDBOX_PARENT"

// Enter runs the rest of the program in user, mount, UTS and network namespaces of
// its own.
//
// In the process that the user started it runs the same command line again
// inside, waits, and returns inside=false and the exit code to leave with.
// Signals are passed on; the process inside dies with this one. Inside it
// prepares the mounts and returns inside=true. Programs that are started
// inside and call Enter themselves get a nested sandbox.
//
// Where namespaces cannot be had, the error says why and what to do.
func Enter() (inside bool, exitCode int, err error) {
	if parent, ok := os.LookupEnv(mark); ok {
		return enterInside(parent)
	}
	if err := checkVisible(); err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	self, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return false, 1, fmt.Errorf("sandbox: own network namespace: %w", err)
	}
	code, err := reexec(append(os.Environ(), mark+"="+self))
	if err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	return false, code, nil
}

func enterInside(parent string) (bool, int, error) {
	if err := os.Unsetenv(mark); err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	if err := furnish(parent); err != nil {
		advice := ""
		if errors.Is(err, fs.ErrPermission) { // a security module may grant the namespaces but no power in them
			advice = hint(err, sysctlFile)
		}
		return false, 1, fmt.Errorf("sandbox: %w%s", err, advice)
	}
	return true, 0, nil
}

// reexec runs the program again in new namespaces and returns its exit code.
func reexec(env []string) (int, error) {
	// Pdeathsig is sent when the thread that forked ends, not the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(signals)

	cmd, err := start(env)
	if err != nil {
		return 0, err
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case s := <-signals:
				_ = cmd.Process.Signal(s) // it may have ended already
			case <-done:
				return
			}
		}
	}()
	return exitStatus(cmd.Wait())
}

func exitStatus(err error) (int, error) {
	var exit *exec.ExitError
	if err == nil || !errors.As(err, &exit) {
		return 0, err
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil // as a shell says it
	}
	return exit.ExitCode(), nil
}

// start forks the copy. Root does not depend on user namespaces: where they
// are switched off, the other namespaces do.
func start(env []string) (*exec.Cmd, error) {
	attr, err := userNamespace()
	if err != nil {
		return nil, err
	}
	cmd := command(env, attr)
	err = cmd.Start()
	if err == nil {
		return cmd, nil
	}
	if os.Geteuid() == 0 {
		plain := command(env, &syscall.SysProcAttr{Cloneflags: withoutUser})
		if plain.Start() == nil {
			return plain, nil
		}
	}
	return nil, fmt.Errorf("cannot create user, mount, UTS and network namespaces: %w%s", err, hint(err, sysctlFile))
}

func command(env []string, attr *syscall.SysProcAttr) *exec.Cmd {
	attr.Pdeathsig = unix.SIGKILL
	return &exec.Cmd{
		Path:        "/proc/self/exe", // the very file, whatever happened to its name
		Args:        os.Args,
		Env:         env,
		Stdin:       os.Stdin,
		Stdout:      os.Stdout,
		Stderr:      os.Stderr,
		SysProcAttr: attr,
	}
}
