// SPDX-License-Identifier: Apache-2.0

// Package cli implements the operator's command line, podlace.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

// Exit statuses.
const (
	exitOK      = 0
	exitDiffers = 1 // the command ran and found an error
	exitFailed  = 2 // it could not run
	exitRefused = 3 // the kernel refused the sandbox, or the operator must decide first
)

// exitError makes the program exit with a status and without a further message.
type exitError int

// Error returns no text, so a joined error has only the messages of the others.
func (exitError) Error() string { return "" }

// Run runs the command line and returns the exit status. It removes terminal escape sequences from the output, which may contain names of
// pods or files.
func Run(args []string, stdout, stderr io.Writer) int {
	out := &output{to: plugin.PlainWriter(stdout)}
	stderr = plugin.PlainWriter(stderr)
	if err := sandbox.EnterMounts(); err != nil {
		printLine(stderr, err.Error())
		return exitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := Command()
	root.SetArgs(args)
	root.SetIn(interruptible{ctx, os.Stdin})
	root.SetOut(out)
	root.SetErr(stderr)
	refuseUnknown(root)
	cmd, err := root.ExecuteContextC(ctx)
	status := exitOf(stderr, cmd, err)
	if out.err != nil && !errors.Is(err, out.err) {
		printLine(stderr, out.err.Error())
		return exitFailed
	}
	return status
}

// output is the standard output of a command. It keeps the first error of a write, so that Run reports lost output.
type output struct {
	to  io.Writer
	err error
}

// Write implements io.Writer.
func (o *output) Write(text []byte) (int, error) {
	n, err := o.to.Write(text)
	o.err = cmp.Or(o.err, err)
	return n, err
}

// refuseUnknown makes the commands that cobra adds fail for unknown names.
func refuseUnknown(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	help, _, _ := root.Find([]string{"help"})
	help.Args = func(_ *cobra.Command, names []string) error {
		found, rest, err := root.Find(names)
		return cmp.Or(err, cobra.NoArgs(found, rest))
	}
	completion, _, _ := root.Find([]string{"completion"})
	completion.RunE = showHelp // cobra checks the arguments of a command that runs
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// exitOf returns the exit status for a command's error, and prints its message if it has one. A message that several errors share is
// printed once.
func exitOf(stderr io.Writer, cmd *cobra.Command, err error) int {
	if err == nil {
		return exitOK
	}
	if text := strings.Trim(err.Error(), "\n"); text != "" {
		printLine(stderr, strings.Join(slices.Compact(strings.Split(suggest(cmd, text), "\n")), "\n"))
	}
	var exit exitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	return exitFailed
}

// suggest replaces cobra's messages about arguments. An unknown command gets the most similar names on the same line, where cobra needs
// several.
func suggest(cmd *cobra.Command, text string) string {
	if flag, why, ok := strings.Cut(text, ": strconv."); ok {
		return flag + map[bool]string{true: ": want true or false", false: ": want a number"}[strings.HasPrefix(why, "ParseBool")]
	}
	if strings.Contains(text, " arg(s), ") {
		return "usage: " + cmd.UseLine()
	}
	var name, path string
	if _, err := fmt.Sscanf(text, "unknown command %q for %q", &name, &path); err != nil {
		return text
	}
	cmd, _, _ = cmd.Root().Find(strings.Fields(path)[1:]) // cobra knows the command
	if !cmd.HasSubCommands() {
		return fmt.Sprintf("%s takes no argument: %q", path, name)
	}
	if names := cmd.SuggestionsFor(name); len(names) > 0 {
		return fmt.Sprintf("%s: did you mean '%s'?", text, strings.Join(names, "' or '"))
	}
	return fmt.Sprintf("%s: '%s --help' lists all", text, path)
}

// rootCommands returns the commands that always need root.
func rootCommands() []string {
	return []string{"canary", "doctor", "gc", "limits", "ls", "reload", "rollback", "support-bundle", "top", "topology"}
}

// onNode is where a command runs that cannot run in the container of podlace-node.
const onNode = "run podlace on the node, or make the manifest with the component debug"

// nodeCommands returns the commands that cannot run in a container of Podlace.
func nodeCommands() []string { return []string{"canary", "gc", "rollback", "support-bundle", "trace"} }

// inContainer returns an error if a command cannot run in the container of this process. sriov can in that of sriov-device-plugin.
func inContainer(cmd *cobra.Command) error {
	switch {
	case slices.Contains(nodeCommands(), cmd.Name()) && doctor.InContainer(doctor.Options{}, doctor.Agent, doctor.DevicePlugin):
		return fmt.Errorf("%s: %s", doctor.Unseen, onNode)
	case strings.HasPrefix(cmd.CommandPath(), "podlace sriov ") && doctor.InContainer(doctor.Options{}, doctor.Agent):
		return fmt.Errorf("%s: run it in a pod of sriov-device-plugin, or %s", doctor.Unseen, onNode)
	}
	return nil
}

// Command returns the root command, from which the documents' reference is generated.
func Command() *cobra.Command {
	root := &cobra.Command{
		Use:           "podlace",
		Short:         "Inspect, test and repair pod networking on one node",
		Version:       plugin.BuildVersion(),
		SilenceErrors: true,
		SilenceUsage:  true,

		DisableSuggestions:         true, // suggest does it
		SuggestionsMinimumDistance: 1,

		PersistentPreRunE: func(cmd *cobra.Command, _ []string) (err error) {
			cmd.Flags().Visit(func(f *pflag.Flag) { // the value of an unset shell variable must not mean all networks or pods
				if f.Value.String() == "" {
					err = fmt.Errorf(`--%s "": want a value`, f.Name)
				}
			})
			if err = cmp.Or(err, inContainer(cmd)); err != nil || cmd.Parent() != cmd.Root() {
				return err
			}
			if slices.Contains(rootCommands(), cmd.Name()) {
				return needRoot()
			}
			return nil
		},
	}
	root.AddCommand(newCanary(), newDoctor(), newExplain(), newGC(), newLimits(), newLs(), newReload(), newRollback(),
		newSchema(), newSRIOV(), newSupportBundle(), newTop(), newTopology(), newTrace(), newValidate(), newVersion())
	addArguments(root)
	return root
}
