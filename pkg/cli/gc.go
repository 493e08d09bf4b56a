// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/reconcile"
)

const gcHelp = `Find dead attachments and, with --yes, remove their addresses, interfaces, rules
and records. Without --yes the command changes nothing.

An attachment is dead if no runtime runs its container, and its network namespace
no longer exists or the node has rebooted since ADD. An attachment whose namespace
exists is never removed. --yes refuses if no runtime could be asked for its
containers, or if every attachment would be removed; --all overrides that. Networks
with disableGC and plugins of other projects are skipped, with a line each.

The exit status is 0 if there is nothing to do, if everything was removed, and for
every dry run; 1 if something is left; 2 if the command could not run or a record
cannot be read; 3 if it refused.`

type gcFlags struct {
	confFlags
	yes, all bool
}

func newGC() *cobra.Command {
	var flags gcFlags
	cmd := &cobra.Command{
		Use:     "gc",
		Example: "  podlace gc\n  podlace gc --network podlace --yes",
		Short:   "Find attachments of deleted pods, and remove them with --yes",
		Long:    gcHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags.add(cmd)
	addBinDir(cmd, &flags.Options)
	cmd.Flags().BoolVar(&flags.yes, "yes", false, "remove the listed attachments")
	cmd.Flags().BoolVar(&flags.all, "all", false, "remove even if no runtime could be asked, or if no attachment would be left")
	return cmd
}

// collection is the result of one run of 'podlace gc', also as JSON.
type collection struct {
	DryRun      bool                    `json:"dryRun"`
	Asked       []string                `json:"asked"` // the runtimes that were asked for their containers
	Attachments []*reconcile.Attachment `json:"attachments"`
	Dead        int                     `json:"dead"`
	Kept        int                     `json:"kept"`
	Removed     int                     `json:"removed"`
	Left        int                     `json:"left"`
	Doubt       string                  `json:"doubt,omitempty"`
	Notes       []string                `json:"notes,omitempty"`
	Errors      []string                `json:"errors,omitempty"`
}

func (f gcFlags) run(stdout, stderr io.Writer) error {
	networks, notes, err := configurations(f.ConfDir)
	if err != nil {
		return err
	}
	// The list is read once, and GC decides about its attachments only. One that an ADD creates later is not in it.
	list, err := reconcile.List(networks)
	if err != nil {
		return err
	}
	if err := f.checkNetwork(networks, list); err != nil {
		return err
	}
	rt := reconcile.AskRuntimes()
	reconcile.Judge(list, rt, f.all)
	c := collection{DryRun: !f.yes, Asked: append([]string{}, rt.Asked...), Notes: append(notes, rt.Notes...)}
	doubt := reconcile.Doubt(list, rt)
	if doubt != nil && !f.all {
		c.Doubt = doubt.Error()
	}
	list = f.filterNetwork(list)
	plans := f.plans(networks, list, &c)
	c.Attachments = append([]*reconcile.Attachment{}, reconcile.Dead(list)...)
	c.Dead, c.Kept = len(c.Attachments), len(list)-len(c.Attachments)
	if f.yes && c.Doubt == "" {
		if err := c.collect(networks, plans, list); err != nil {
			return err
		}
	}
	_, damaged, err := attachment.Scan() // GC removes some of the unreadable records
	return errors.Join(c.report(f.output, stdout, stderr), printDamaged(stderr, damagedIn(f.network, damaged)), err)
}

// plans returns the planned GC calls. The reason why a network gets none is added to c.Notes. Without a configuration file, a network's
// records are used.
func (f gcFlags) plans(networks []reconcile.Network, list []*reconcile.Attachment, c *collection) (plans []reconcile.Plan) {
	planned := map[string]bool{}
	for _, a := range reconcile.Dead(list) {
		if planned[a.Network] {
			continue
		}
		planned[a.Network] = true
		n, ok := reconcile.Named(networks, a.Network)
		if !ok {
			c.Notes = append(c.Notes, fmt.Sprintf("network %s has no configuration in %s: it is cleaned up from its records", a.Network, f.ConfDir))
		}
		plan := reconcile.NewPlan(n, list, f.BinDir)
		plans, c.Notes = append(plans, plan), append(c.Notes, plan.Notes...)
	}
	return plans
}

func (c *collection) collect(networks []reconcile.Network, plans []reconcile.Plan, list []*reconcile.Attachment) error {
	for _, p := range plans {
		if err := p.Collect(list); err != nil {
			c.Errors = append(c.Errors, err.Error())
		}
	}
	after, err := reconcile.List(networks)
	if err != nil {
		return err
	}
	c.Left = reconcile.Compare(list, after)
	c.Removed = c.Dead - c.Left
	return nil
}

func (c *collection) report(output string, stdout, stderr io.Writer) error {
	err := printAs(output, stdout, c, func() { c.print(stdout, stderr) })
	switch {
	case err != nil:
		return err
	case c.refused():
		return exitError(exitRefused)
	case c.Left > 0 || len(c.Errors) > 0:
		return exitError(exitDiffers)
	}
	return nil
}

func (c *collection) refused() bool { return !c.DryRun && c.Doubt != "" }

func (c *collection) print(stdout, stderr io.Writer) {
	for _, text := range append(c.Notes, c.Errors...) {
		printLine(stderr, text)
	}
	if c.Dead > 0 {
		printAttachments(stdout, c.Attachments, []string{"DEAD"}, describe)
	}
	fmt.Fprintln(stdout, c.summary())
	if c.Doubt != "" {
		c.explain(stdout)
	}
}

func describe(a *reconcile.Attachment) []string {
	if a.Removed == nil {
		return []string{a.Dead}
	}
	return []string{map[bool]string{true: "removed: ", false: "LEFT: "}[*a.Removed] + a.Dead}
}

func (c *collection) summary() string {
	text := fmt.Sprintf("%d of %d attachments are dead, %d stay", c.Dead, c.Dead+c.Kept, c.Kept)
	switch {
	case c.Dead == 0:
		return text
	case c.refused():
		return text + "; nothing was removed"
	case c.DryRun:
		return text + "; nothing was removed: --yes does it"
	}
	return fmt.Sprintf("%s; %d removed, %d left", text, c.Removed, c.Left)
}

func (c *collection) explain(w io.Writer) {
	verb := "--yes would refuse"
	if c.refused() {
		verb = "refused"
	}
	advice := "Check the list above"
	if len(c.Asked) == 0 {
		advice = "Start the runtime, or check the list above"
	}
	fmt.Fprintf(w, "%s: %s\n%s; --all --yes removes the attachments anyway.\n", verb, c.Doubt, advice)
}
