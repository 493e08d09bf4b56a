// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/demo"
	"github.com/podlace/podlace/pkg/sandbox"
)

const demoHelp = `Run a conflist on two pods in new namespaces and measure the result: times,
reachability, hostPorts, limits, and what is left after DEL.

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
	cmd.Flags().StringVar(&flags.conflist, "conflist", "", "configuration to run (default: the shipped "+conf.Default+")")
	addOutput(cmd, &flags.output)
	return cmd
}

func (f demoFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	opts, err := f.options(f.plugins)
	if err != nil {
		return err
	}
	if f.reference == "" {
		return f.runOne(ctx, opts, stdout, stderr)
	}
	reference, err := f.options(f.reference)
	if err != nil {
		return err
	}
	return f.runBoth(ctx, opts, reference, stdout, stderr)
}

// options() reads all files that the demo needs, before the sandbox hides these files.
func (f demoFlags) options(dir string) (opts demo.Options, err error) {
	opts = demo.Options{Version: thisBuild().Version, Source: "shipped " + conf.Default}
	if f.conflist == "" {
		opts.Conflist, err = conf.Conflist(conf.Default)
	} else {
		opts.Source = f.conflist
		opts.Conflist, err = os.ReadFile(f.conflist)
	}
	if err != nil {
		return opts, err
	}
	names, err := demo.PluginsOf(opts.Conflist)
	if err != nil {
		return opts, err
	}
	dirs := []string{dir}
	if dir == "" {
		exe, err := os.Executable()
		if err != nil {
			return opts, err
		}
		dirs = []string{filepath.Dir(exe), cniBinDir}
	}
	opts.Plugins, err = pluginFolder(dirs, append(names, "loopback"))
	return opts, err
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

// runOne runs the demo script once. The current process enters the sandbox.
func (f demoFlags) runOne(ctx context.Context, opts demo.Options, stdout, stderr io.Writer) error {
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
	if f.output == outputJSON {
		return f.oneJSON(ctx, opts, stdout)
	}
	demo.PrintHead(stdout, opts, sandboxOwner())
	table, err := demo.NewTable(stdout, opts.Conflist)
	if err != nil {
		return err
	}
	report, err := demo.Run(ctx, opts, table.Row)
	if err != nil {
		return err
	}
	demo.PrintSummary(stdout, report)
	return verdict(report)
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

func (f demoFlags) oneJSON(ctx context.Context, opts demo.Options, stdout io.Writer) error {
	report, err := demo.Run(ctx, opts, func(demo.Row) {})
	if err != nil {
		return err
	}
	if err := printJSON(stdout, report); err != nil {
		return err
	}
	return verdict(report)
}

// runBoth runs the demo script once with each of two plugin folders. Each run has its own process and its own sandbox, so that the first
// run cannot affect the second run.
func (f demoFlags) runBoth(ctx context.Context, ours, theirs demo.Options, stdout, stderr io.Writer) (err error) {
	var c demo.Comparison
	fmt.Fprintln(stderr, "running", ours.Plugins)
	if c.Podlace, err = f.child(ctx, ours, stderr); err != nil {
		return err
	}
	fmt.Fprintln(stderr, "running", theirs.Plugins)
	if c.Reference, err = f.child(ctx, theirs, stderr); err != nil {
		return err
	}
	if f.output == outputJSON {
		err = printJSON(stdout, c)
	} else {
		demo.PrintComparison(stdout, c)
	}
	if err != nil {
		return err
	}
	return verdict(c.Podlace)
}

func (f demoFlags) child(ctx context.Context, opts demo.Options, stderr io.Writer) (report demo.Report, err error) {
	exe, err := os.Executable()
	if err != nil {
		return report, err
	}
	args := []string{"demo", "--plugins", opts.Plugins, "--output", outputJSON}
	if f.conflist != "" {
		args = append(args, "--conflist", f.conflist)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, &out, stderr
	err = cmd.Run()
	// If any row of the report has the result Miss, the child process exits with exitDiffers after it has printed the complete report.
	if decodeErr := json.Unmarshal(out.Bytes(), &report); decodeErr != nil {
		return report, fmt.Errorf("run on %s: %w", opts.Plugins, errors.Join(err, decodeErr))
	}
	return report, nil
}

func verdict(r demo.Report) error {
	if r.Failed() {
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
