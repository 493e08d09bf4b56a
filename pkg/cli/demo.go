// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/demo"
	"github.com/podlace/podlace/pkg/sandbox"
)

const demoHelp = `Run a conflist on two pods in new namespaces and measure the result: times,
reachability, hostPorts, limits, and what is left after DEL. Without --conflist,
the chain of plugins runs first, then podlace-pod.

The demo does not touch this machine's network. It needs no root if the kernel
lets users create namespaces; otherwise it asks sudo. The exit status is 0 if
everything is as expected, 1 if something differs, 2 if the demo could not run,
3 if it could not create namespaces.`

// cniBinDir is the folder in which container runtimes search for plugins. The command 'make install' copies the plugins to this folder.
const cniBinDir = "/opt/cni/bin"

// demoFlags contains the values of the flags of 'podlace demo'.
type demoFlags struct {
	plugins   string
	reference string
	conflist  string
	output    string
}

func newDemo() *cobra.Command {
	var flags demoFlags
	cmd := &cobra.Command{
		Use:     "demo",
		Example: "  podlace demo\n  podlace demo --plugins /opt/cni/bin -o json",
		Short:   "Run the plugin chain on two pods and measure what they get",
		Long:    demoHelp,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&flags.plugins, "plugins", "", "folder with the plugins (default: the folder of podlace, else "+cniBinDir+")")
	cmd.Flags().StringVar(&flags.reference, "reference", "", "folder with other plugins to run the same script on")
	cmd.Flags().StringVar(&flags.conflist, "conflist", "", "file or shipped configuration to run (default: "+conf.Default+" and "+conf.Pod+")")
	addOutput(cmd, &flags.output)
	return cmd
}

func (f demoFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	if f.reference != "" {
		return f.compare(ctx, stdout, stderr)
	}
	runs := []demo.Options{{Source: f.conflist}}
	if f.conflist == "" {
		runs = []demo.Options{{Source: conf.Default}, {Source: conf.Pod}}
	}
	for i := range runs {
		if err := f.complete(&runs[i], f.plugins); err != nil {
			return err
		}
	}
	return f.runAll(ctx, runs, stdout, stderr)
}

// complete reads all files that a run needs, before the sandbox hides these files.
func (f demoFlags) complete(o *demo.Options, dir string) (err error) {
	o.Version = thisBuild().Version
	shipped, unknown := conf.Conflist(o.Source)
	o.Conflist, err = os.ReadFile(o.Source)
	if unknown == nil && (f.conflist == "" || errors.Is(err, fs.ErrNotExist)) {
		o.Conflist, o.Source, err = shipped, "shipped "+o.Source, nil
	}
	if err != nil {
		return err
	}
	names, err := demo.PluginsOf(o.Conflist)
	if err != nil {
		return err
	}
	dirs := []string{dir}
	if dir == "" {
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		dirs = []string{filepath.Dir(exe), cniBinDir}
	}
	o.Plugins, err = pluginFolder(dirs, append(names, "loopback"))
	return err
}

// pluginFolder returns the first folder that contains all plugins which the demo needs.
func pluginFolder(dirs, names []string) (string, error) {
	var errs []error
	for _, dir := range dirs {
		dir, err := filepath.Abs(dir)
		if err == nil {
			err = demo.CheckPlugins(dir, names)
		}
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

// runAll runs the demo script with each conflist. The current process enters the sandbox, in which no run leaves anything.
func (f demoFlags) runAll(ctx context.Context, runs []demo.Options, stdout, stderr io.Writer) error {
	inside, code, err := sandbox.Enter()
	if err != nil {
		fmt.Fprintln(stderr, "podlace: no sandbox:", err)
		code = exitRefused
	}
	switch {
	case inside:
	case code == exitRefused:
		return asRoot(ctx, stdout, stderr)
	default:
		return exitStatus(code)
	}
	var reports []demo.Report
	for i, o := range runs {
		if i > 0 && f.output != outputJSON {
			fmt.Fprintln(stdout)
		}
		report, err := f.runOne(ctx, o, stdout)
		if err != nil {
			return err
		}
		reports = append(reports, report)
	}
	if f.output == outputJSON {
		if err := printJSON(stdout, reports); err != nil {
			return err
		}
	} else if len(reports) > 1 {
		demo.PrintTimes(stdout, reports)
	}
	return verdict(reports...)
}

func (f demoFlags) runOne(ctx context.Context, opts demo.Options, stdout io.Writer) (demo.Report, error) {
	if f.output == outputJSON {
		return demo.Run(ctx, opts, func(demo.Row) {})
	}
	demo.PrintHead(stdout, opts, sandboxOwner())
	table, err := demo.NewTable(stdout, opts.Conflist)
	if err != nil {
		return demo.Report{}, err
	}
	report, err := demo.Run(ctx, opts, table.Row)
	if err == nil {
		demo.PrintSummary(stdout, report)
	}
	return report, err
}

// sandboxOwner describes which user on the host owns the sandbox.
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

// compare runs the demo script once with each of two plugin folders. Each run has its own process and its own sandbox, so that the first
// run cannot affect the second run.
func (f demoFlags) compare(ctx context.Context, stdout, stderr io.Writer) error {
	var reports []demo.Report
	for _, dir := range []string{f.plugins, f.reference} {
		report, err := f.child(ctx, dir, stderr)
		if err != nil {
			return err
		}
		reports = append(reports, report)
	}
	if f.output == outputJSON {
		if err := printJSON(stdout, reports); err != nil {
			return err
		}
	} else {
		demo.PrintComparison(stdout, reports[0], reports[1])
	}
	return verdict(reports[0])
}

// child runs the demo in a process of its own, with the first shipped conflist if none is named.
func (f demoFlags) child(ctx context.Context, dir string, stderr io.Writer) (report demo.Report, err error) {
	opts := demo.Options{Source: cmp.Or(f.conflist, conf.Default)}
	if err := f.complete(&opts, dir); err != nil {
		return report, err
	}
	fmt.Fprintln(stderr, "running", opts.Plugins)
	exe, err := os.Executable()
	if err != nil {
		return report, err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, "demo", "--plugins", opts.Plugins, "--output", outputJSON, "--conflist",
		cmp.Or(f.conflist, conf.Default))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, &out, stderr
	err = cmd.Run()
	// If any row of the report has the result Miss, the child process exits with exitDiffers after it has printed the complete report.
	var reports []demo.Report
	if decodeErr := json.Unmarshal(out.Bytes(), &reports); decodeErr != nil || len(reports) == 0 {
		return report, fmt.Errorf("run on %s: %w", opts.Plugins, errors.Join(err, decodeErr))
	}
	return reports[0], nil
}

func verdict(reports ...demo.Report) error {
	if slices.ContainsFunc(reports, demo.Report.Failed) {
		return exitError(exitDiffers)
	}
	return nil
}

func exitStatus(code int) error {
	if code == exitOK {
		return nil
	}
	return exitError(code)
}
