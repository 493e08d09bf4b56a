// SPDX-License-Identifier: Apache-2.0

// Command demo runs a conflist on two pods in new namespaces and compares what they get with Podlace's promises about times, reachability,
// hostPorts, limits and leaked state. Without -conflist, the chain of plugins runs first, then podlace-pod. The machine's network stays
// unchanged. The exit status is 0 if all is as expected, 1 if something differs, and 2 if the demo could not run.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	exitDiffers = 1
	exitFailed  = 2
)

type options struct {
	plugins   string
	reference string
	conflist  string
	json      bool
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	code := exitFailed
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		code, err = o.run(ctx, os.Stdout, os.Stderr)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		code = exitFailed
	}
	os.Exit(code)
}

func parse(args []string, stderr io.Writer) (o options, err error) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.plugins, "plugins", "bin", "`folder` with the plugins")
	flags.StringVar(&o.reference, "reference", "", "`folder` with other plugins to run the same script on")
	flags.StringVar(&o.conflist, "conflist", "", "`file` to run (default: "+conf.Default+" and "+conf.Pod+")")
	flags.BoolVar(&o.json, "json", false, "print the reports as JSON")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unknown argument %q: -h lists the flags", flags.Arg(0))
	}
	return o, nil
}

// run returns the exit status.
func (o options) run(ctx context.Context, stdout, stderr io.Writer) (int, error) {
	if o.reference != "" {
		return o.compare(ctx, stdout, stderr)
	}
	sources := []string{o.conflist}
	if o.conflist == "" {
		sources = []string{conf.Default, conf.Pod}
	}
	var runs []runOptions
	for _, source := range sources {
		r, err := o.complete(source)
		if err != nil {
			return exitFailed, err
		}
		runs = append(runs, r)
	}
	inside, code, err := sandbox.Enter()
	if err != nil || !inside {
		return code, err
	}
	return o.runAll(ctx, runs, stdout)
}

// complete reads all files that a run needs, before the sandbox hides them.
func (o options) complete(source string) (r runOptions, err error) {
	r = runOptions{Source: source}
	if o.conflist == "" {
		r.Source = "shipped " + source
		r.Conflist, err = conf.Conflist(source)
	} else {
		r.Conflist, err = os.ReadFile(source)
	}
	if err != nil {
		return r, err
	}
	list, err := reconcile.Load("", r.Conflist)
	if err != nil {
		return r, err
	}
	if r.Plugins, err = filepath.Abs(o.plugins); err != nil {
		return r, err
	}
	if err := chain.CheckPlugins(r.Plugins, append(chain.PluginsOf(list), "loopback")); err != nil {
		return r, fmt.Errorf("%w: make build makes them", err)
	}
	return r, nil
}

// runAll runs the script with each conflist. Nothing of a run stays in the sandbox.
func (o options) runAll(ctx context.Context, runs []runOptions, stdout io.Writer) (int, error) {
	var reports []Report
	for i, r := range runs {
		if i > 0 && !o.json {
			fmt.Fprintln(stdout)
		}
		report, err := o.runOne(ctx, r, stdout)
		if err != nil {
			return exitFailed, err
		}
		reports = append(reports, report)
	}
	if o.json {
		return verdict(reports...), json.NewEncoder(stdout).Encode(reports)
	}
	if len(reports) > 1 {
		PrintTimes(stdout, reports)
	}
	return verdict(reports...), nil
}

func (o options) runOne(ctx context.Context, r runOptions, stdout io.Writer) (Report, error) {
	if o.json {
		return runScript(ctx, r, func(Row) {})
	}
	PrintHead(stdout, r, sandboxOwner())
	table, err := NewTable(stdout, r.Conflist)
	if err != nil {
		return Report{}, err
	}
	report, err := runScript(ctx, r, table.Row)
	if err == nil {
		PrintSummary(stdout, report)
	}
	return report, err
}

// sandboxOwner says which user of the host owns the sandbox.
func sandboxOwner() string {
	var inside, outside uint32
	data, err := os.ReadFile("/proc/self/uid_map")
	if err == nil {
		_, err = fmt.Sscan(string(data), &inside, &outside)
	}
	if err != nil || outside == 0 {
		return "made by root"
	}
	return fmt.Sprintf("made by user %d, without root", outside)
}

// compare runs the script once with each plugin folder, in processes and sandboxes of their own so that the runs cannot affect each other.
func (o options) compare(ctx context.Context, stdout, stderr io.Writer) (int, error) {
	var reports []Report
	for _, dir := range []string{o.plugins, o.reference} {
		report, err := o.child(ctx, dir, stderr)
		if err != nil {
			return exitFailed, err
		}
		reports = append(reports, report)
	}
	if o.json {
		return verdict(reports[0]), json.NewEncoder(stdout).Encode(reports)
	}
	PrintComparison(stdout, reports[0], reports[1])
	return verdict(reports[0]), nil
}

// child runs the script in a process of its own, with the first shipped conflist if none is named.
func (o options) child(ctx context.Context, dir string, stderr io.Writer) (report Report, err error) {
	exe, err := os.Executable()
	if err != nil {
		return report, err
	}
	fmt.Fprintln(stderr, "running", dir)
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, "-plugins", dir, "-json", "-conflist", cmp.Or(o.conflist, filepath.Join("conf", conf.Default)))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, &out, stderr
	err = cmd.Run()
	// After a report with a miss, the exit status is exitDiffers.
	var reports []Report
	if decodeErr := json.Unmarshal(out.Bytes(), &reports); decodeErr != nil || len(reports) == 0 {
		return report, fmt.Errorf("run on %s: %w", dir, errors.Join(err, decodeErr))
	}
	return reports[0], nil
}

func verdict(reports ...Report) int {
	if slices.ContainsFunc(reports, Report.Failed) {
		return exitDiffers
	}
	return 0
}
