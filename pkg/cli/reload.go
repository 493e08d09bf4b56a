// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/restore"
)

const reloadHelp = `Restore the rules of all pods after a flush, such as 'nft flush ruleset', a
restart of the nftables or firewalld service or 'iptables -t nat -F': first the
rules that protect pods and node, then masquerade and hostPorts. The command also
restores limits, bridges with their ports and addresses, and forwarding. It reads
the records under /run/podlace and leaves what is in place.

--watch keeps running and restores at once what other programs remove. It retries
what could not be restored, and exits with 0 when it is stopped.

Otherwise the exit status is 0 if all of this is in place, and 2 if something could
not be restored.`

func newReload() *cobra.Command {
	watch := false
	cmd := &cobra.Command{
		Use:     "reload",
		Example: "  podlace reload\n  podlace reload --watch",
		Short:   "Restore the rules and limits of all pods after a flush",
		Long:    reloadHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			stderr := cmd.ErrOrStderr()
			if watch {
				return restore.Watch(cmd.Context(), slog.New(slog.NewTextHandler(stderr, nil)), func(restore.Look) {})
			}
			return reload(cmd.OutOrStdout(), stderr)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "keep running, and restore at once what other programs remove")
	return cmd
}

func reload(stdout, stderr io.Writer) error {
	err := restore.All(slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err == nil {
		err = printReloaded(stdout, stderr)
	}
	ports, examineErr := doctor.Examine(doctor.Options{}, "ports")
	err = errors.Join(err, examineErr)
	for _, f := range ports {
		if f.Level == doctor.Error {
			err = errors.Join(err, fmt.Errorf("%s: %s: %s", f.What, f.Consequence, f.Command))
		}
	}
	return err
}

// printReloaded prints each plugin's number of live attachments, and the unreadable records.
func printReloaded(stdout, stderr io.Writer) error {
	records, damaged, err := attachment.Scan()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, rec := range records {
		if !plugin.NetnsEnded(rec.Netns) {
			count[rec.Plugin]++
		}
	}
	fmt.Fprintf(stdout, "reloaded: %d attachments of bridge, %d with hostPorts, %d with limits\n", count["bridge"], count["portmap"],
		count["bandwidth"])
	return printDamaged(stderr, damaged)
}

// damagedIn returns those of the unreadable records that are of a network, or all.
func damagedIn(network string, damaged []attachment.Damaged) []attachment.Damaged {
	return slices.DeleteFunc(damaged, func(d attachment.Damaged) bool { return network != "" && d.Network != network })
}

// printDamaged prints unreadable records with the reasons. Their attachments were skipped, so the command ends with exitFailed.
func printDamaged(stderr io.Writer, damaged []attachment.Damaged) error {
	for _, d := range damaged {
		printLine(stderr, fmt.Sprintf("%s cannot be read and is skipped: %v; DEL of its pod removes its attachment", d.Path(), d.Reason))
	}
	if len(damaged) > 0 {
		return exitError(exitFailed)
	}
	return nil
}
