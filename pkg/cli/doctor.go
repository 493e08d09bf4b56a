// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/plugin"
)

const doctorHelp = `Examine this node: its kernel, the container runtime's configuration, the
network configurations, the plugins, their state, firewalls and other programs
that manage the network. Each finding has its evidence, its consequence and the
command to run. 'podlace explain' explains the name of a check, and the code in
brackets of a finding.

The examination itself changes nothing. It calls STATUS of the plugins as
container runtimes do, and STATUS restores rules that were flushed.

--fix offers the remedies that cannot harm pods and asks before it applies one.

Exit status: 0 without errors (warnings may remain), 1 with an error, 2 if the
node could not be examined.`

const doctorExample = `  podlace doctor
  podlace doctor --all
  podlace doctor conflist binaries
  podlace doctor -o json | jq '.[] | select(.level == "error")'
  podlace doctor --fix`

type doctorFlags struct {
	options  doctor.Options
	output   string
	all, fix bool
}

func newDoctor() *cobra.Command {
	var flags doctorFlags
	cmd := &cobra.Command{
		Use:               "doctor [CHECK...]",
		Short:             "Find what keeps pods on this node from working, and the command to run",
		Long:              doctorHelp,
		Example:           doctorExample,
		ValidArgsFunction: cobra.FixedCompletions(doctor.Names(), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd.InOrStdin(), cmd.OutOrStdout(), args)
		},
	}
	addConfDir(cmd, &flags.options)
	addBinDir(cmd, &flags.options)
	cmd.Flags().BoolVar(&flags.all, "all", false, "also list the checks without a finding")
	cmd.Flags().BoolVar(&flags.fix, "fix", false, "apply remedies that cannot harm pods, after asking for each")
	addOutput(cmd, &flags.output)
	return cmd
}

func (f doctorFlags) run(stdin io.Reader, stdout io.Writer, only []string) error {
	if f.fix && f.output == outputJSON {
		return errors.New("--fix asks questions: it cannot be combined with -o json")
	}
	found, err := doctor.Examine(f.options, only...)
	if err != nil {
		return err
	}
	err = printAs(f.output, stdout, found, func() { printFindings(stdout, found, f.all) })
	if f.fix && err == nil {
		found = fixFindings(stdin, stdout, found)
	}
	if err == nil && count(found)[doctor.Error] > 0 {
		err = exitError(exitDiffers)
	}
	return err
}

func count(found []doctor.Finding) map[doctor.Level]int {
	n := map[doctor.Level]int{}
	for _, f := range found {
		n[f.Level]++
	}
	return n
}

// printFindings prints the errors, then the warnings, and finally how many there are.
func printFindings(w io.Writer, found []doctor.Finding, all bool) {
	printLevel(w, found, doctor.Error)
	printLevel(w, found, doctor.Warning)
	var rows [][]string
	var unseen []string
	for _, f := range found {
		if f.What == doctor.Unseen {
			unseen = append(unseen, f.Check)
		}
		if all && (f.Level == doctor.OK || f.Level == doctor.Skipped) {
			rows = append(rows, []string{string(f.Level), f.Check, plain(f.What)})
		}
	}
	printTable(w, rows)
	if len(unseen) > 0 {
		fmt.Fprintf(w, "not checked: %s: %s: %s\n\n", strings.Join(unseen, ", "), doctor.Unseen, onNode)
	}
	n := count(found)
	fmt.Fprintf(w, "errors: %d, warnings: %d, ok: %d, skipped: %d\n",
		n[doctor.Error], n[doctor.Warning], n[doctor.OK], n[doctor.Skipped])
}

func printLevel(w io.Writer, found []doctor.Finding, level doctor.Level) {
	for _, f := range found {
		if f.Level == level {
			printFinding(w, f)
		}
	}
}

// maxEvidence limits the printed evidence, which can be another program's output.
const maxEvidence = 600

func printFinding(w io.Writer, f doctor.Finding) {
	line := func(name, text string) {
		if text != "" {
			fmt.Fprintf(w, "  %-12s %s\n", name, plugin.Plain(strings.ReplaceAll(text, "\n", "; "), maxEvidence))
		}
	}
	code := ""
	if string(f.Code) != f.Check {
		code = " [" + string(f.Code) + "]"
	}
	fmt.Fprintf(w, "%s %s: %s%s\n", f.Level, f.Check, plugin.Plain(f.What, maxEvidence), code)
	line("evidence", f.Evidence)
	line("consequence", f.Consequence)
	line("command", f.Command)
	fmt.Fprintln(w)
}

// fixFindings asks about each fixable finding, applies the remedy if the user agrees, and returns the findings that remain.
func fixFindings(stdin io.Reader, stdout io.Writer, found []doctor.Finding) (left []doctor.Finding) {
	answers := bufio.NewScanner(stdin)
	for _, f := range found {
		if !f.Fixable {
			left = append(left, f)
			continue
		}
		fmt.Fprintf(stdout, "%s: %s\n  apply '%s'? [y/N] ", f.Check, plugin.Plain(f.What, maxEvidence), plugin.Plain(f.Command, maxEvidence))
		yes := answers.Scan() && isYes(answers.Text())
		err := answers.Err()
		if yes {
			err = f.Fix()
		}
		switch {
		case err != nil:
			fmt.Fprintf(stdout, "not applied: %v\n", err)
			left = append(left, f)
		case yes:
			fmt.Fprintln(stdout, "applied")
		default:
			fmt.Fprintln(stdout, "not applied")
			left = append(left, f)
		}
	}
	return left
}

// isYes reports whether an answer to a [y/N] question means yes.
func isYes(answer string) bool {
	return strings.HasPrefix(strings.ToLower(strings.TrimSpace(answer)), "y")
}
