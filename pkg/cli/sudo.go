// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// asRoot runs the current podlace command again under sudo. podlace calls asRoot if the kernel refused to create the sandbox. The kernel's
// error has already been printed.
func asRoot(ctx context.Context, stdout, stderr io.Writer) error {
	if os.Geteuid() == 0 || os.Getenv("SUDO_UID") != "" {
		return exitError(exitRefused)
	}
	sudo, err := exec.LookPath("sudo")
	if err != nil {
		fmt.Fprintln(stderr, "podlace: run it as root")
		return exitError(exitRefused)
	}
	command, err := sudoCommand(sudo)
	if err != nil {
		return err
	}
	if !mayAsk(ctx, sudo) {
		fmt.Fprintln(stderr, "podlace: run:", strings.Join(command, " "))
		return exitError(exitRefused)
	}
	fmt.Fprintln(stderr, "podlace: running:", strings.Join(command, " "))
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitStatus(exit.ExitCode())
	}
	return err
}

func sudoCommand(sudo string) ([]string, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return append([]string{sudo, exe}, os.Args[1:]...), nil
}

// mayAsk reports whether podlace can use sudo: sudo works without a password, or the user can type the password at a terminal.
func mayAsk(ctx context.Context, sudo string) bool {
	if exec.CommandContext(ctx, sudo, "-n", "true").Run() == nil {
		return true
	}
	return isTerminal(os.Stdin)
}

// isTerminal reports whether a file is a terminal. Other character devices, such as /dev/null, are no terminals.
func isTerminal(f *os.File) bool {
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return err == nil && (strings.HasPrefix(target, "/dev/pts/") || strings.HasPrefix(target, "/dev/tty"))
}

func exitStatus(code int) error {
	if code == exitOK {
		return nil
	}
	return exitError(code)
}
