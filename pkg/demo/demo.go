// SPDX-License-Identifier: Apache-2.0

// Package demo runs a conflist with real namespaces and compares what the pods get with the promises: a network in time, ports, limits, and
// no state left behind.
//
// The demo is a list of steps in a lab. The lab consists of the process's namespace as the node, a namespace per pod, and one for a client
// outside that reaches the node over a veth. Each step gives one [Row]. Rows are data; a [Table] prints them.
//
// [Run] changes the network of the process's own namespace: call it inside a sandbox.
package demo

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Options are the options of a run.
type Options struct {
	Plugins  string // folder with the plugin binaries
	Conflist []byte // the network configuration list
	Source   string // where Conflist comes from, for the report
	Version  string // of this program, for the report
}

// Run runs all steps and calls show after each one. The report is complete even if steps missed. err only means that the lab could not be
// created.
func Run(ctx context.Context, opts Options, show func(Row)) (Report, error) {
	start := time.Now()
	report := Report{Plugins: opts.Plugins, Conflist: opts.Source, Kernel: Kernel(), Version: opts.Version}
	l, err := openLab(opts)
	if err != nil {
		return report, err
	}
	defer l.close()
	for _, s := range script(l.chain.plugins()) {
		row := s.row(ctx, l)
		report.add(row)
		show(row)
		if ctx.Err() != nil {
			return report, fmt.Errorf("stopped: %w", context.Cause(ctx))
		}
	}
	report.Seconds = time.Since(start).Seconds()
	return report, nil
}

// CheckPlugins returns an error for binaries that the configuration needs and the folder lacks.
func CheckPlugins(dir string, names []string) error {
	var missing []string
	for _, name := range names {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("plugin folder %s: no executable %s", dir, strings.Join(missing, ", "))
	}
	return nil
}

// Kernel returns the release of the running kernel.
func Kernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(release))
}
