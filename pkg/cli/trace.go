// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/demo"
	"github.com/podlace/podlace/pkg/doctor"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reconcile"
	"github.com/podlace/podlace/pkg/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

const traceHelp = `Run ADD, CHECK and DEL of a network configuration for one new pod. For each plugin
the command shows the duration in milliseconds, the part of each kind of work, and the
changes: links, addresses, routes, nftables, sysctls, each with the milliseconds from
the start of the process. The kinds of work are: start of the process, setup
(configuration and namespace), lock (waiting for other pods), ipam, changes, record
(writing it), rest (reading the state of the kernel), exit of the process.

It runs in new namespaces with an empty network. It does not touch this node, and
it needs no root if the kernel lets users create namespaces. Give the pod a hostPort
and a limit to see the changes of portmap and bandwidth.

With a running POD, as namespace/name or by its container ID or the first 6 or more
characters of it, the command runs CHECK of each plugin with the configuration of the
pod's ADD. It shows the duration, the result, and the objects of each plugin:
interfaces, addresses, leases, rules, limits, VFs. It changes nothing and needs root.
Exit status: 1 if a CHECK failed or could not run.

An existing file, and a name that begins with / or ends in .conflist, .conf or .json,
is a CONFLIST.`

const traceExample = `  podlace trace
  podlace trace /etc/cni/net.d/10-podlace.conflist --plugins /opt/cni/bin
  podlace trace --hostport 8080 --limit 100M -o json
  podlace trace shop/web-0
  podlace trace 5d1f8a2b7c90 -o json`

const canaryHelp = `Run ADD, CHECK and DEL of the installed configuration for one pod on this node, as
the runtime does. Use it after an upgrade or a change of the configuration. The pod's
addresses must answer requests from the node. The pod is removed at the end, also
after a failure. It has no hostPort and no limit, and uses one address for some
milliseconds.

Exit status: 0 if all works, 1 if a step failed, 2 if the command could not run.`

const canaryExample = `  podlace canary
  podlace canary || echo 'put the old version back'
  podlace canary --conflist /etc/cni/net.d/10-podlace.conflist --plugins /opt/cni/bin`

type traceFlags struct {
	demoFlags
	hostPort int
	limit    string
	cache    string
}

func newTrace() *cobra.Command {
	var f traceFlags
	cmd := &cobra.Command{
		Use:     "trace [CONFLIST|POD]",
		Short:   "Show the changes of each plugin in a sandbox, or CHECK and the objects of a running pod",
		Long:    traceHelp,
		Example: traceExample,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && !isFile(args[0]) {
				return f.tracePod(cmd.Context(), args[0], cmd.OutOrStdout())
			}
			f.conflist = strings.Join(args, "")
			return f.trace(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&f.plugins, "plugins", "", "folder with the plugins (default: the folder of podlace, else "+cniBinDir+
		"; for a POD that of the runtime)")
	cmd.Flags().StringVar(&f.cache, "cache-dir", "/var/lib/cni", "for a POD: folder in which the runtime keeps the data of each ADD")
	cmd.Flags().IntVar(&f.hostPort, "hostport", 0, "give the pod this hostPort")
	cmd.Flags().StringVar(&f.limit, "limit", "", "limit the pod in both directions: a rate such as 100M")
	addOutput(cmd, &f.output)
	return cmd
}

func (f traceFlags) trace(ctx context.Context, stdout, stderr io.Writer) error {
	limit := uint64(0)
	err := checkOutput(f.output)
	if err == nil && f.limit != "" {
		limit, err = bandwidth.ParseRate(f.limit)
	}
	if err == nil && (f.hostPort < 0 || f.hostPort > 65535) {
		err = fmt.Errorf("--hostport %d: want 1 to 65535", f.hostPort)
	}
	if err != nil {
		return err
	}
	options := demo.Options{Source: cmp.Or(f.conflist, conf.Default)}
	if err := f.complete(&options, f.plugins); err != nil {
		return err
	}
	_, node, nodeErr := nodefile.Read() // before the sandbox hides it
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil:
		fmt.Fprintln(stderr, "podlace: no sandbox:", err)
		return asRoot(ctx, stdout, stderr)
	case !inside:
		return exitStatus(code)
	}
	if nodeErr == nil {
		if _, err := nodefile.Write(node); err != nil {
			return err
		}
	}
	return runTrace(ctx, demo.TraceOptions{Options: options, HostPort: f.hostPort, Limit: limit}, f.output, stdout)
}

// runTrace prints a line for each plugin call, and returns the error of the plugin chain.
func runTrace(ctx context.Context, options demo.TraceOptions, output string, stdout io.Writer) error {
	var all []demo.Traced
	err := demo.Trace(ctx, options, func(t demo.Traced) {
		all = append(all, t)
		if output != outputJSON {
			printTraced(stdout, t)
		}
	})
	if output == outputJSON {
		if err := printJSON(stdout, all); err != nil {
			return err
		}
	} else {
		printTotals(stdout, all)
	}
	return err
}

func printTraced(w io.Writer, t demo.Traced) {
	fmt.Fprintf(w, "%-6s %-12s %7.1f ms  changes: %d\n", t.Verb, t.Plugin, milliseconds(t.Took), len(t.Changes))
	printPhases(w, t)
	for _, change := range t.Changes {
		fmt.Fprintf(w, "         %7.2f  %s\n", milliseconds(change.At), plugin.Plain(change.What, maxEvidence))
	}
	if t.Error != "" {
		fmt.Fprintf(w, "         error: %s\n", plugin.Plain(t.Error, maxEvidence))
	}
}

// printPhases prints the time that a plugin spent in each phase.
func printPhases(w io.Writer, t demo.Traced) {
	var list []string
	for _, p := range t.Phases {
		list = append(list, fmt.Sprintf("%s %.2f", p.Name, milliseconds(p.Took)))
	}
	if len(list) > 0 {
		fmt.Fprintf(w, "         %s\n", strings.Join(list, ", "))
	}
}

func printTotals(w io.Writer, all []demo.Traced) {
	total := map[string]time.Duration{}
	for _, t := range all {
		total[t.Verb] += t.Took
	}
	fmt.Fprintln(w)
	for _, verb := range []string{"ADD", "CHECK", "DEL"} {
		if total[verb] > 0 {
			fmt.Fprintf(w, "%-6s all plugins  %7.1f ms\n", verb, milliseconds(total[verb]))
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func newCanary() *cobra.Command {
	var f demoFlags
	cmd := &cobra.Command{
		Use:     "canary",
		Short:   "Test the installed plugins and configuration with one pod on this node",
		Long:    canaryHelp,
		Example: canaryExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.canary(cmd.Context(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&f.plugins, "plugins", "", "folder with the plugins (default: that of the runtime)")
	cmd.Flags().StringVar(&f.conflist, "conflist", "", "configuration (default: the first in the runtime's folder)")
	addOutput(cmd, &f.output)
	return cmd
}

// firstConflist returns the first network configuration in a folder.
func firstConflist(dir string) (string, error) {
	networks, notes, err := reconcile.Networks(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%w: podlace doctor prints the command that installs a configuration; --conflist names another file", err)
	case err != nil:
		return "", err
	case len(networks) > 0:
		return networks[0].File, nil
	case len(notes) > 0:
		return "", fmt.Errorf("no network configuration in %s can be used: %s", dir, strings.Join(notes, "; "))
	}
	return "", fmt.Errorf("%s has no network configuration: name one with --conflist", dir)
}

func (f demoFlags) canary(ctx context.Context, stdout io.Writer) error {
	if err := errors.Join(checkOutput(f.output), needRoot()); err != nil {
		return err
	}
	folders := doctor.Folders()
	if f.plugins == "" {
		f.plugins = folders.BinDir
	}
	if f.conflist == "" {
		first, err := firstConflist(folders.ConfDir)
		if err != nil {
			return err
		}
		f.conflist = first
	}
	conflist, err := store.ReadFile(f.conflist)
	if err != nil {
		return err
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil { // as ip-netns(8) does
		return err
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // if the reader of stdout ends, writes fail, and the pod is still removed
	options := demo.TraceOptions{Options: demo.Options{Plugins: f.plugins, Conflist: conflist}, Ping: true}
	if err := runTrace(ctx, options, f.output, stdout); err != nil {
		printLine(stdout, fmt.Sprintf("the canary failed with %s and the plugins of %s: %v", f.conflist, f.plugins, err))
		return exitError(exitDiffers)
	}
	return nil
}
