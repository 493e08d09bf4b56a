// SPDX-License-Identifier: Apache-2.0

// Package sandbox gives a program its own network to change, and compares the state before and after.
//
// Enter re-executes the program in new user, mount, UTS and network namespaces, which works as root and as an ordinary user. NewPod creates
// further network namespaces as a container runtime does. Take and Diff compare everything that a CNI plugin may change. The machine's own
// network is not affected.
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

// mark is set for the re-executed process and holds its parent's network namespace. That distinguishes it from an accidentally inherited
// variable.
const mark = "PODLACE_SANDBOX_PARENT"

// Enter runs the rest of the program in its own user, mount, UTS and network namespaces.
//
// In the process that the user started, Enter runs the same command line again inside and waits for it. It returns inside=false and the
// exit code for the process. It passes signals on; the inner process dies with the outer one. In the inner process, Enter prepares the
// mounts and returns inside=true. A program that is started inside and calls Enter itself gets a nested sandbox.
//
// If namespaces are not available, the error contains the reason and a hint.
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
	if err := prepareMounts(parent); err != nil {
		advice := ""
		if errors.Is(err, fs.ErrPermission) { // a security module may allow the namespaces but no capabilities in them
			advice = hint(err, sysctlFile)
		}
		return false, 1, fmt.Errorf("sandbox: %w%s", err, advice)
	}
	return true, 0, nil
}

// reexec runs the program again in new namespaces and returns its exit code.
func reexec(env []string) (int, error) {
	// Pdeathsig is sent when the forking thread ends, not the process.
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
		return 128 + int(status.Signal()), nil // the convention of shells
	}
	return exit.ExitCode(), nil
}

// start forks the copy. Root does not need user namespaces: if they are disabled, it uses only the other namespaces.
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
		Path:        "/proc/self/exe", // this file, even if its name now leads elsewhere
		Args:        os.Args,
		Env:         env,
		Stdin:       os.Stdin,
		Stdout:      os.Stdout,
		Stderr:      os.Stderr,
		SysProcAttr: attr,
	}
}
