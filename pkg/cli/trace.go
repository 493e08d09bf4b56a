// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
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

With a running POD, as namespace/name, by its name, its container ID or the first 6 or
more characters of it, the command runs CHECK of each plugin with the configuration of the
pod's ADD. It shows the duration, the result, and the objects that each plugin recorded:
interfaces, addresses, leases, rules, limits, VFs. If the kernel lacks recorded rules, it
names the command that restores them. It changes nothing and needs root.
Exit status: 1 if a CHECK failed or could not run, 3 if the kernel refused the
namespaces, 2 for other errors.

An existing file, and a name that begins with / or ends in .conflist, .conf or .json,
is a CONFLIST.`

const traceExample = `  podlace trace
  podlace trace /etc/cni/net.d/10-podlace.conflist --plugins /opt/cni/bin
  podlace trace --hostport 8080 --limit 100M -o json
  podlace trace shop/web-0
  podlace trace 5d1f8a2b7c90 -o json`

type traceFlags struct {
	plugins  string
	conflist string
	output   string
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
	var err error
	if f.limit != "" {
		limit, err = bandwidth.ParseRate(f.limit)
	}
	if f.hostPort < 0 || f.hostPort > 65535 {
		err = fmt.Errorf("--hostport %d: want 1 to 65535", f.hostPort)
	}
	if err != nil {
		return err
	}
	list, err := readConflist(cmp.Or(f.conflist, conf.Default))
	if err != nil {
		return err
	}
	plugins, err := findPlugins(f.plugins, chain.PluginsOf(list))
	if err != nil {
		return err
	}
	_, node, nodeErr := nodefile.Read() // before the sandbox hides it
	inside, code, err := sandbox.Enter()
	switch {
	case err != nil:
		printLine(stderr, fmt.Sprintf("no sandbox: %v", err))
		return exitError(exitRefused)
	case !inside:
		return exitError(code)
	}
	if nodeErr == nil {
		if _, err := nodefile.Write(node); err != nil {
			return err
		}
	}
	if err := logChanges(); err != nil {
		return err
	}
	return f.runVerbs(ctx, plugins, list, limit, stdout)
}

// runVerbs runs ADD, CHECK and DEL, and prints what each plugin did.
func (f traceFlags) runVerbs(ctx context.Context, plugins string, list *chain.List, limit uint64, stdout io.Writer) error {
	p, err := openTestPod(plugins, list, f.output != outputJSON, stdout)
	if err != nil {
		return err
	}
	p.Limit = limit
	if f.hostPort > 0 {
		p.Ports = []chain.PortMapping{{HostPort: f.hostPort, ContainerPort: f.hostPort, Protocol: "tcp"}}
	}
	if _, err = p.chain.Add(ctx, p.Attachment); err == nil {
		err = p.chain.Check(ctx, p.Attachment)
	}
	err = errors.Join(err, p.remove(ctx))
	if f.output == outputJSON {
		return errors.Join(err, printJSON(stdout, p.calls))
	}
	printTotals(stdout, p.calls)
	return err
}

func printCall(w io.Writer, t chain.Call) {
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
func printPhases(w io.Writer, t chain.Call) {
	var list []string
	for _, p := range t.Phases {
		list = append(list, fmt.Sprintf("%s %.2f", p.Name, milliseconds(p.Took)))
	}
	if len(list) > 0 {
		fmt.Fprintf(w, "         %s\n", strings.Join(list, ", "))
	}
}

func printTotals(w io.Writer, all []chain.Call) {
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
