// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
)

const reloadHelp = `Bring back the rules of all pods after somebody flushed them, as 'nft flush
ruleset', a restart of the nftables or firewalld service or 'iptables -t nat -F'
do: what protects pods and the node first, then masquerade and hostPorts. So it
does for limits after another program removed their qdiscs. All are written from
the records under /run/podlace; what is there stays.

The exit status is 0 when all is there, and 2 when something could not be
brought back.`

func newReload() *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Bring back the rules and limits of all pods after a flush",
		Long:  reloadHelp,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reload(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
}

func reload(stdout, stderr io.Writer) error {
	if err := needRoot(); err != nil {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := errors.Join(bridge.RenewClusterCIDRs(log), bridge.Restore(host, log, attachment.Waiting), portmap.Restore(host, log),
		bandwidth.Restore(host, log)); err != nil {
		return err
	}
	records, err := attachment.All()
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, rec := range records {
		if !plugin.NetnsGone(rec.Netns) {
			count[rec.Plugin]++
		}
	}
	fmt.Fprintf(stdout, "reloaded: %d attachments of bridge, %d with hostPorts, %d with limits\n", count["bridge"], count["portmap"],
		count["bandwidth"])
	return tellUnreadable(stderr)
}

// tellUnreadable names the records that cannot be read.
func tellUnreadable(stderr io.Writer) error {
	damaged, err := attachment.Unreadable()
	return errors.Join(tellDamaged(stderr, damaged), err)
}

// tellDamaged names records that cannot be read, with the reason. What they stand for is not looked at, so the command ends with
// exitFailed.
func tellDamaged(stderr io.Writer, damaged []attachment.Damaged) error {
	for _, d := range damaged {
		tell(stderr, fmt.Sprintf("%s cannot be read and is left out: %v; DEL of its pod removes what it stands for", d.Path(), d.Reason))
	}
	if len(damaged) > 0 {
		return exitError(exitFailed)
	}
	return nil
}
