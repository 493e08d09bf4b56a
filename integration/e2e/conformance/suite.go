// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

const (
	// fixedPorts matches tests whose pods use fixed ports of the nodes, and which run one after another because they would block each other.
	fixedPorts = `using hostNetwork|hostNetwork: true|HostPort|CLOSE_WAIT`
	// runLimit is the time limit for one run of the e2e tests.
	runLimit = 90 * time.Minute
)

// labelFilter selects the network tests, without those that need a cloud or a special cluster or run for hours.
func labelFilter(mode string) string {
	features := "IPv6DualStack"
	if mode == "iptables" { // with nftables, kube-proxy has no NodePorts on 127.0.0.1
		features += ", LocalhostNodePorts"
	}
	return "sig-network && !Slow && !Disruptive && Feature: isSubsetOf {" + features + "}"
}

// testSuite is Kubernetes' test program e2e.test with the programs that it needs and its access to the cluster.
type testSuite struct {
	programs, kubectl string // the folder of ginkgo and e2e.test, and a program
	kubeconfig        string
	in                []string // the wrapper command that runs a program where the cluster is reachable
	environment       []string
	processes, nodes  int
	filter, focus     string
}

// runSpecs runs most tests in parallel, and those with fixed ports one after another, and returns all results. With focus, it runs only the
// matching ones, one after another.
func (s testSuite) runSpecs(ctx context.Context, folder string) (suiteReport, error) {
	if s.focus != "" {
		return s.runPart(ctx, folder, 1, "--focus="+s.focus)
	}
	all, err := s.runPart(ctx, filepath.Join(folder, "parallel"), s.processes, "--skip="+fixedPorts)
	if err != nil {
		return suiteReport{}, err
	}
	serial, err := s.runPart(ctx, filepath.Join(folder, "serial"), 1, "--focus="+fixedPorts)
	if err != nil {
		return suiteReport{}, err
	}
	all.mergeReport(serial)
	return all, nil
}

// runPart runs the selected tests. A failed one is in the report and is no error.
func (s testSuite) runPart(ctx context.Context, folder string, processes int, selection string) (suiteReport, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return suiteReport{}, fmt.Errorf("folder of the report: %w", err)
	}
	log, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		return suiteReport{}, fmt.Errorf("log of e2e.test: %w", err)
	}
	defer log.Close()
	args := append(append([]string{}, s.in...), "env", "HOME="+folder, "TMPDIR="+folder, filepath.Join(s.programs, "ginkgo"),
		"--procs="+strconv.Itoa(processes), "--timeout="+runLimit.String(), "--no-color", "-v", "--poll-progress-after=4m",
		"--output-dir="+folder, "--json-report=report.json", "--label-filter="+s.filter, selection)
	args = append(args, filepath.Join(s.programs, "e2e.test"), "--", "--kubeconfig="+s.kubeconfig, "--kubectl-path="+s.kubectl,
		"--num-nodes="+strconv.Itoa(s.nodes), "--provider=skeleton", "--disable-log-dump", "--report-dir="+folder)
	command := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // the programs are those of the caller
	command.Env, command.Stdout, command.Stderr = s.environment, log, log
	err = command.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return suiteReport{}, fmt.Errorf("run e2e.test: %w", err)
	}
	got, wrong := readReport(filepath.Join(folder, "report.json"))
	if wrong != nil {
		return suiteReport{}, errors.Join(fmt.Errorf("e2e.test ended with %w; its output is %s", err, log.Name()), wrong)
	}
	return got, nil
}
