// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/podlace/podlace/pkg/attachment"
)

// A completion is a function that suggests values for an argument or a flag in the shell.
type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

// addCompletions adds shell completion to a command and all its subcommands. The shell then completes pods, networks, PCI addresses and
// output formats.
func addCompletions(cmd *cobra.Command) {
	switch _, argument, _ := strings.Cut(cmd.Use, " "); argument {
	case "[POD]":
		cmd.ValidArgsFunction = firstOnly(completePods)
	case "[CONFLIST|POD]":
		cmd.ValidArgsFunction = firstOnly(completePodsAndFiles)
	case "DEVICE", "[DEVICE]":
		cmd.ValidArgsFunction = firstOnly(completeDevices)
	case "":
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		switch f.Name {
		case "network":
			_ = cmd.RegisterFlagCompletionFunc(f.Name, completeNetworks) // the only possible error is an unknown flag
		case "output":
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(formats(f.Usage), cobra.ShellCompDirectiveNoFileComp))
		}
	})
	for _, sub := range cmd.Commands() {
		addCompletions(sub)
	}
}

// formats() returns the output formats that a flag's usage text lists, for example "output format: table, wide or json".
func formats(usage string) []string {
	_, list, _ := strings.Cut(usage, ": ")
	return strings.FieldsFunc(strings.ReplaceAll(list, " or ", ","), func(r rune) bool { return r == ',' || r == ' ' })
}

// firstOnly restricts a completion function to the first argument of a command.
func firstOnly(complete completion) completion {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(cmd, args, prefix)
	}
}

func completePods(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return recordedValues(func(rec attachment.Record) string { return rec.Pod }), cobra.ShellCompDirectiveNoFileComp
}

func completePodsAndFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return recordedValues(func(rec attachment.Record) string { return rec.Pod }), cobra.ShellCompDirectiveDefault
}

func completeNetworks(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return recordedValues(func(rec attachment.Record) string { return rec.Network }), cobra.ShellCompDirectiveNoFileComp
}

// recordedValues returns the values that one field has in the records of all attachments.
func recordedValues(field func(attachment.Record) string) []string {
	all, _ := attachment.All() // unreadable records complete nothing
	return distinctValues(all, field)
}

// distinctValues returns the sorted values that one field has in the given records, without duplicates.
func distinctValues(all []attachment.Record, field func(attachment.Record) string) (found []string) {
	for _, rec := range all {
		if value := field(rec); value != "" {
			found = append(found, plain(value))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// completeDevices returns the PCI addresses of the network cards that are found in the folder of the flag --sysfs.
func completeDevices(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	sysfs := "/sys"
	if f := cmd.Flags().Lookup("sysfs"); f != nil {
		sysfs = f.Value.String()
	}
	paths, _ := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/class"))
	var addresses []string
	for _, path := range paths {
		if class, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(class), "0x02") {
			addresses = append(addresses, filepath.Base(filepath.Dir(path)))
		}
	}
	return addresses, cobra.ShellCompDirectiveNoFileComp
}
