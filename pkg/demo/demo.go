// SPDX-License-Identifier: Apache-2.0

// Package demo runs a conflist in real network namespaces. The demo compares the measured results with Podlace's promises about start
// times, ports, limits and leaked state.
//
// The demo is a list of steps, which run in a test network (lab). In the lab, the process's own network namespace serves as the node. Each
// pod has its own namespace. A client outside the node also has its own namespace, which a veth pair connects to the node. Each step
// returns its result as one [Row]. A Row contains only data, and a [Table] prints it.
//
// [Run] changes the network of the process's own namespace, so callers must call [Run] inside a sandbox.
package demo

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Options contains the options for one run of the demo.
type Options struct {
	Plugins  string // folder with the plugin binaries
	Conflist []byte // the network configuration list
	Source   string // source of Conflist, for the report
	Version  string // of this program, for the report
}

// Run runs all steps and calls the function `show` after each step. The returned report contains all steps, even if some results differ
// from the expected results. Run returns an error only if the test network could not be created.
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

// CheckPlugins returns an error if a plugin folder lacks any of the named plugin binaries.
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

// Kernel returns the release of the kernel that is running.
func Kernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(release))
}
