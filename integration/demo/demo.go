// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"
)

type runOptions struct {
	Plugins  string // folder with the plugin binaries
	Conflist []byte // the network configuration list
	Source   string // source of Conflist, for the report
}

// runScript runs all steps in a test network, the lab, and calls show after each. The process's network namespace is the node; each pod has
// its own, and so has a client outside the node, connected by a veth pair. An error means that there was no lab; results that differ from
// the wanted ones are in the report.
func runScript(ctx context.Context, opts runOptions, show func(Row)) (Report, error) {
	start := time.Now()
	report := Report{Plugins: opts.Plugins, Conflist: opts.Source, Kernel: Kernel()}
	l, err := openLab(opts)
	if err != nil {
		return report, err
	}
	defer l.close()
	for _, s := range script(pluginTypes(l.chain.List)) {
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

// Kernel returns the release of the running kernel.
func Kernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(release))
}
