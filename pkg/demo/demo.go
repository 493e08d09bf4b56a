// SPDX-License-Identifier: Apache-2.0

// Package demo runs a conflist on real namespaces and compares what the pods
// get with what they were promised: a network within a time, ports, limits,
// and nothing left behind.
//
// The demo is a list of steps over a lab. The lab is the namespace of the
// process as the node, a namespace for each pod, and one for a client outside
// that reaches the node over a veth. Each step gives one [Row]; the rows are
// data, and rendering them is somebody else's business (see [Table]).
//
// [Run] changes the network of the process's own namespace: call it inside a
// sandbox.
package demo

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Options say what to run.
type Options struct {
	Plugins  string // the folder with the plugin binaries
	Conflist []byte // the network configuration list
	Source   string // where Conflist comes from, for the report
	Version  string // of this program, for the report
}

// Run runs all steps and calls show after each one. The report is complete
// even if steps missed; err tells only that there was no lab to run them in.
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

// CheckPlugins reports the binaries that the configuration names and the
// folder lacks.
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
