// SPDX-License-Identifier: Apache-2.0

// Package cli implements the operator's command line, podlace.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
)

// The following constants are the exit statuses of the podlace command.
const (
	exitOK      = 0
	exitDiffers = 1 // the command ran and found an error
	exitFailed  = 2 // it could not run
	exitRefused = 3 // the kernel refused the sandbox, or the operator must decide first
)

// The error type exitError makes the program exit with a status and without a further message.
type exitError int

// Error returns the exit status as text.
func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Run runs the command line and returns the exit status. If the output contains names of pods or files, Run removes terminal escape
// sequences from them.
func Run(args []string, stdout, stderr io.Writer) int {
	stdout, stderr = plugin.PlainWriter(stdout), plugin.PlainWriter(stderr)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(interruptible{ctx, os.Stdin})
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	return exitOf(stderr, cmd, err)
}

// exitOf returns the exit status for the error of a command. exitOf also prints the error, unless the error consists only of an exit
// status.
func exitOf(stderr io.Writer, cmd *cobra.Command, err error) int {
	if err == nil {
		return exitOK
	}
	if other := withoutStatus(err); other != nil {
		printLine(stderr, suggest(cmd, other).Error())
	}
	var exit exitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	return exitFailed
}

// withoutStatus returns the joined errors without those that consist only of an exit status.
func withoutStatus(err error) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		if errors.As(err, new(exitError)) {
			return nil
		}
		return err
	}
	var others []error
	for _, e := range joined.Unwrap() {
		others = append(others, withoutStatus(e))
	}
	return errors.Join(others...)
}

// suggest() adds the most similar command names to the error about an unknown command, on the same line. Cobra's own suggestion needs
// several lines.
func suggest(cmd *cobra.Command, err error) error {
	var name string
	if _, scan := fmt.Sscanf(err.Error(), "unknown command %q", &name); scan != nil {
		return err
	}
	near := fmt.Sprintf("'%s --help' lists all", cmd.CommandPath())
	if names := cmd.SuggestionsFor(name); len(names) > 0 {
		near = fmt.Sprintf("did you mean '%s'?", strings.Join(names, "' or '"))
	}
	return fmt.Errorf("%w: %s", err, near)
}

// printLine prints a message on a single line. Control characters in a pod's name or in a plugin's message are removed.
func printLine(stderr io.Writer, text string) {
	fmt.Fprintln(stderr, "podlace:", plugin.Plain(strings.ReplaceAll(text, "\n", "; "), reconcile.MaxMessage))
}

// Command returns the root command. The command reference in the documents is generated from it.
func Command() *cobra.Command { return newRoot() }

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "podlace",
		Short:         "Inspect, test and repair pod networking on one node",
		Version:       plugin.BuildVersion(),
		SilenceErrors: true,
		SilenceUsage:  true,

		DisableSuggestions:         true, // suggest does it
		SuggestionsMinimumDistance: 1,
	}
	root.AddCommand(newCanary(), newDoctor(), newExplain(), newGC(), newLimits(), newLs(), newReload(), newRollback(),
		newSchema(), newSRIOV(), newSupportBundle(), newTop(), newTopology(), newTrace(), newValidate(), newVersion())
	addCompletions(root)
	return root
}
