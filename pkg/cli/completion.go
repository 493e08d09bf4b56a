// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
)

// addArguments gives a command and all its subcommands the check and the shell completion of the arguments in their usage lines, and the
// completion of networks. addChoice completes the words of a choice.
func addArguments(cmd *cobra.Command) {
	pods := func(rec attachment.Record) string { return rec.Pod }
	switch _, argument, _ := strings.Cut(cmd.Use, " "); argument {
	case "[POD]":
		cmd.Args, cmd.ValidArgsFunction = cobra.MaximumNArgs(1), firstOnly(recordedValues(pods, cobra.ShellCompDirectiveNoFileComp))
	case "[CONFLIST|POD]":
		cmd.Args, cmd.ValidArgsFunction = cobra.MaximumNArgs(1), firstOnly(recordedValues(pods, cobra.ShellCompDirectiveDefault))
	case "DEVICE", "[DEVICE]":
		cmd.ValidArgsFunction = firstOnly(completeDevices)
	case "":
		cmd.ValidArgsFunction = cobra.NoFileCompletions
		if cmd.HasParent() { // cobra itself refuses unknown commands
			cmd.Args = cobra.NoArgs
		}
	}
	if cmd.Flags().Lookup("network") != nil {
		networks := func(rec attachment.Record) string { return rec.Network }
		_ = cmd.RegisterFlagCompletionFunc("network", recordedValues(networks, cobra.ShellCompDirectiveNoFileComp)) // the flag exists
	}
	for _, sub := range cmd.Commands() {
		addArguments(sub)
	}
}

// firstOnly restricts a completion to the first argument of a command.
func firstOnly(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(cmd, args, prefix)
	}
}

// recordedValues returns a completion with one field's values in the records of all attachments.
func recordedValues(field func(attachment.Record) string, directive cobra.ShellCompDirective) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		all, _, _ := attachment.Scan() // unreadable records complete nothing
		return distinctValues(all, field), directive
	}
}

// distinctValues returns one field's sorted values in the records, without duplicates.
func distinctValues(all []attachment.Record, field func(attachment.Record) string) (found []string) {
	for _, rec := range all {
		if value := field(rec); value != "" {
			found = append(found, plain(value))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// completeDevices returns the PCI addresses of the network cards in the folder of --sysfs.
func completeDevices(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	paths, _ := filepath.Glob(filepath.Join(cmd.Flags().Lookup("sysfs").Value.String(), "bus/pci/devices/*/class"))
	var addresses []string
	for _, path := range paths {
		if class, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(class), "0x02") {
			addresses = append(addresses, filepath.Base(filepath.Dir(path)))
		}
	}
	return addresses, cobra.ShellCompDirectiveNoFileComp
}
