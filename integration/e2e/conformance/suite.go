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
	// alone matches specs whose pods use fixed ports of the nodes. In parallel, two such specs would wait for one another.
	alone = `using hostNetwork|hostNetwork: true|HostPort|CLOSE_WAIT`
	// time limit of one run of the suite.
	limit = 90 * time.Minute
)

// filter selects the network specs by labels, without specs that need a cloud, a special cluster or hours.
func filter(mode string) string {
	features := "IPv6DualStack"
	if mode == "iptables" { // with nftables, kube-proxy has no NodePorts on 127.0.0.1
		features += ", LocalhostNodePorts"
	}
	return "sig-network && !Slow && !Disruptive && Feature: isSubsetOf {" + features + "}"
}

// suite is Kubernetes' e2e.test, its programs, and the cluster that it tests.
type suite struct {
	programs, kubectl string // the folder of ginkgo and e2e.test, and a program
	kubeconfig        string
	in                []string // the wrapper command that runs a program where the cluster is reachable
	environment       []string
	processes, nodes  int
	filter, focus     string
}

// run runs the specs side by side, and those of fixed ports one after another, and returns the results of both. With a focus it runs
// what matches, one after another.
func (s suite) run(ctx context.Context, folder string) (report, error) {
	if s.focus != "" {
		return s.part(ctx, folder, 1, "--focus="+s.focus)
	}
	all, err := s.part(ctx, filepath.Join(folder, "parallel"), s.processes, "--skip="+alone)
	if err != nil {
		return report{}, err
	}
	serial, err := s.part(ctx, filepath.Join(folder, "serial"), 1, "--focus="+alone)
	if err != nil {
		return report{}, err
	}
	all.merge(serial)
	return all, nil
}

// part runs one part of the suite. It returns no error for a failed spec, which the report contains.
func (s suite) part(ctx context.Context, folder string, processes int, selection string) (report, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return report{}, fmt.Errorf("folder of the report: %w", err)
	}
	log, err := os.Create(filepath.Join(folder, "log"))
	if err != nil {
		return report{}, fmt.Errorf("log of e2e.test: %w", err)
	}
	defer log.Close()
	args := append(append([]string{}, s.in...), "env", "HOME="+folder, "TMPDIR="+folder, filepath.Join(s.programs, "ginkgo"),
		"--procs="+strconv.Itoa(processes), "--timeout="+limit.String(), "--no-color", "-v", "--poll-progress-after=4m",
		"--output-dir="+folder, "--json-report=report.json", "--label-filter="+s.filter, selection)
	args = append(args, filepath.Join(s.programs, "e2e.test"), "--", "--kubeconfig="+s.kubeconfig, "--kubectl-path="+s.kubectl,
		"--num-nodes="+strconv.Itoa(s.nodes), "--provider=skeleton", "--disable-log-dump", "--report-dir="+folder)
	command := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // the programs are those of the caller
	command.Env, command.Stdout, command.Stderr = s.environment, log, log
	err = command.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return report{}, fmt.Errorf("run e2e.test: %w", err)
	}
	got, wrong := readReport(filepath.Join(folder, "report.json"))
	if wrong != nil {
		return report{}, errors.Join(fmt.Errorf("e2e.test ended with %w; its output is %s", err, log.Name()), wrong)
	}
	return got, nil
}
