// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-iptables/iptables"

	"github.com/podlace/podlace/pkg/child"
)

// List returns those of the given chains of the nat table that exist. It starts one process per chain and one for the version of iptables,
// which is slow, so only CHECK calls it.
func List(is4 bool, chains ...string) (Table, error) { return listBy(name(is4), "nat", chains) }

// ListMangle is List for the mangle table.
func ListMangle(is4 bool, chains ...string) (Table, error) {
	return listBy(name(is4), "mangle", chains)
}

// ListLegacy is List for legacy xtables.
func ListLegacy(is4 bool, chains ...string) (Table, error) {
	return listBy(legacyProgram(is4), "nat", chains)
}

func listBy(program, table string, chains []string) (Table, error) {
	path, err := lookPath(program)
	if err != nil {
		return nil, err
	}
	return listWithin(timeout, path, table, chains)
}

// listWithin limits the total time, because the iptables library limits only the wait for the xtables lock. A process that hangs continues
// to run, but does no harm: it holds no lock of Podlace and changes nothing.
func listWithin(most time.Duration, path, table string, chains []string) (Table, error) {
	done := make(chan struct{})
	var rules Table
	var err error
	go func() {
		defer close(done)
		rules, err = list(path, table, chains)
	}()
	select {
	case <-done:
		return rules, err
	case <-time.After(most):
		return nil, busyError{fmt.Errorf("%s: %w", path, child.ErrTimeout)}
	}
}

func list(path, from string, chains []string) (Table, error) {
	for _, variable := range os.Environ() { // the library passes on the environment, which may name another module folder
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "XTABLES_") {
			os.Unsetenv(name)
		}
	}
	table, err := iptables.New(iptables.Path(path), iptables.Timeout(xtablesWait))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	rules := Table{}
	for _, chain := range chains {
		lines, err := table.List(from, chain)
		var exit *iptables.Error
		if errors.As(err, &exit) && exit.ExitStatus() == exitNoChain {
			continue
		}
		if err != nil && exit != nil && exit.ExitStatus() == exitBusy {
			return nil, busyError{err}
		}
		if err != nil {
			return nil, err
		}
		rules[chain] = nil
		for _, line := range lines {
			if strings.HasPrefix(line, "-A ") {
				rules[chain] = append(rules[chain], line+" ")
			}
		}
	}
	return rules, nil
}
