// SPDX-License-Identifier: Apache-2.0

// Package sandbox gives a program a private network. [Enter] starts the program again in new user, mount, UTS and network namespaces, as
// root or as an ordinary user, and [NewPod] creates more network namespaces, as a container runtime does. The network of the machine stays
// unchanged.
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

// markEnv holds the parent's network namespace in the environment of the process in the sandbox. The value proves that the parent set the
// variable, and that it was not inherited by accident.
const markEnv = "PODLACE_SANDBOX_PARENT"

// Enter runs the rest of the program in its own user, mount, UTS and network namespaces.
//
// The process that the user started runs the same command line again in these, passes signals to this second process, and waits for it.
// In the first process, Enter returns inside=false with the exit code. In the second, which dies with the first, it prepares the mounts and
// returns inside=true. A program in the sandbox that calls Enter gets a nested one.
//
// If the kernel refuses the namespaces, the error has the reason and a hint.
func Enter() (inside bool, exitCode int, err error) {
	if parent, ok := os.LookupEnv(markEnv); ok {
		return enterInside(parent)
	}
	if err := checkVisible(); err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	self, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return false, 1, fmt.Errorf("sandbox: own network namespace: %w", err)
	}
	code, err := reexec(append(os.Environ(), markEnv+"="+self))
	if err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	return false, code, nil
}

func enterInside(parent string) (bool, int, error) {
	if err := os.Unsetenv(markEnv); err != nil {
		return false, 1, fmt.Errorf("sandbox: %w", err)
	}
	if err := prepareMounts(parent); err != nil {
		advice := ""
		if errors.Is(err, fs.ErrPermission) { // a security module may allow the namespaces but no capabilities in them
			advice = namespaceHint(err, sysctlFile)
		}
		return false, 1, fmt.Errorf("sandbox: %w%s", err, advice)
	}
	return true, 0, nil
}

// reexec runs the program again in new namespaces and returns its exit code.
func reexec(env []string) (int, error) {
	// The kernel sends Pdeathsig when the starting thread ends, not the parent process.
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

// start starts the second process, which runs in the sandbox. If the kernel refuses a user namespace, root does without, because it can
// create the others itself.
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
	return nil, fmt.Errorf("cannot create user, mount, UTS and network namespaces: %w%s", err, namespaceHint(err, sysctlFile))
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
