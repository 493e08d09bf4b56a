// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/child"
)

// timeout limits an iptables process. It includes the wait for the xtables lock, which takes at most xtablesWait seconds.
const (
	timeout     = 20 * time.Second
	xtablesWait = 10
)

// folders are searched for the iptables programs instead of PATH, which may be empty or hostile.
var folders = [...]string{"/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"}

// Exit statuses of iptables(8): exitBusy is a resource problem, such as a held xtables lock, and exitNoChain a missing chain, whose message
// depends on the version of iptables-nft.
const (
	exitNoChain = 1
	exitBusy    = 4
)

// MissingProgram is the error for an iptables program that is not installed.
type MissingProgram struct{ Name string }

func (e *MissingProgram) Error() string { return e.Name + " is not installed" }

// MissingFeature returns the name of the program. plugin.Code recognizes the error by this method.
func (e *MissingProgram) MissingFeature() string { return e.Name }

// busyError means that an iptables program waited too long for a lock or did not end in time.
type busyError struct{ error }

func (e busyError) Unwrap() error { return e.error }

// Busy returns true, because a retry may succeed.
func (busyError) Busy() bool { return true }

// isBusy reports whether err has a method Busy that returns true.
func isBusy(err error) bool {
	var busy interface{ Busy() bool }
	return errors.As(err, &busy) && busy.Busy()
}

// Refused reports whether iptables rejected its input.
func Refused(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() != exitBusy
}

// Installed reports whether the iptables programs of an address family are installed.
func Installed(is4 bool) bool { return installed(name(is4)) }

func installed(program string) bool {
	_, err := lookPath(program + "-restore")
	return err == nil
}

func name(is4 bool) string {
	if is4 {
		return "iptables"
	}
	return "ip6tables"
}

func lookPath(name string) (string, error) {
	for _, dir := range folders {
		path := dir + "/" + name
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", &MissingProgram{name}
}

func readTable(program, table string, hold *os.File) (Table, error) {
	out, err := run(program, "-save", "", hold, "-t", table)
	return parse(out), err
}

func run(program, tool, stdin string, hold *os.File, args ...string) (string, error) {
	path, err := lookPath(program + tool)
	if err != nil {
		return "", err
	}
	var stdout, stderr child.Buffer
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/sbin:/usr/bin:/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err = child.Run(cmd, timeout, hold)
	if err == nil {
		return stdout.String(), nil
	}
	var exit *exec.ExitError
	late := errors.Is(err, child.ErrTimeout) || errors.As(err, &exit) && exit.ExitCode() == exitBusy
	err = fmt.Errorf("%s%s: %w: %s", program, tool, err, strings.Join(strings.Fields(stderr.String()), " "))
	if late {
		return "", busyError{err}
	}
	return "", err
}
