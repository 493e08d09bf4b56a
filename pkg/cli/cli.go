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

// Error returns no text, so that a joined error has only the messages of the other errors.
func (exitError) Error() string { return "" }

// Run runs the command line and returns the exit status. If the output contains names of pods or files, Run removes terminal escape
// sequences from them.
func Run(args []string, stdout, stderr io.Writer) int {
	stdout, stderr = plugin.PlainWriter(stdout), plugin.PlainWriter(stderr)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := Command()
	root.SetArgs(args)
	root.SetIn(interruptible{ctx, os.Stdin})
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	return exitOf(stderr, cmd, err)
}

// exitOf returns the exit status for the error of a command, and prints its message if it has one.
func exitOf(stderr io.Writer, cmd *cobra.Command, err error) int {
	if err == nil {
		return exitOK
	}
	if text := strings.Trim(err.Error(), "\n"); text != "" {
		printLine(stderr, suggest(cmd, text))
	}
	var exit exitError
	if errors.As(err, &exit) {
		return int(exit)
	}
	return exitFailed
}

// suggest adds the most similar command names to the message about an unknown command, on the same line. Cobra's own suggestion needs
// several lines.
func suggest(cmd *cobra.Command, text string) string {
	var name string
	if _, err := fmt.Sscanf(text, "unknown command %q", &name); err != nil {
		return text
	}
	if names := cmd.SuggestionsFor(name); len(names) > 0 {
		return fmt.Sprintf("%s: did you mean '%s'?", text, strings.Join(names, "' or '"))
	}
	return fmt.Sprintf("%s: '%s --help' lists all", text, cmd.CommandPath())
}

// Command returns the root command. The command reference in the documents is generated from it.
func Command() *cobra.Command {
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
