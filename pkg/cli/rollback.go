// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/rollback"
)

func newRollback() *cobra.Command {
	var folders doctor.Options
	var o rollback.Options
	cmd := &cobra.Command{
		Use:     "rollback",
		Example: "  podlace rollback\n  podlace rollback --yes",
		Short:   "Hand running pods over to the reference plugins",
		Long: `Rewrites the state of running pods into the form of the reference plugins, and removes Podlace's own state: tables, index, records.
From then on the reference plugins delete these pods. The pods' traffic continues.

Install the reference plugins first: pods that Podlace adds later would not be rewritten. Without --yes the command changes nothing.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			o.ConfDir = folders.ConfDir
			if o.Networks, o.Damaged, err = configurations(o.ConfDir); err != nil {
				return err
			}
			for _, text := range o.Damaged {
				printLine(cmd.ErrOrStderr(), text)
			}
			o.Out = cmd.OutOrStdout()
			if err := rollback.Run(o); err != nil {
				printLine(cmd.ErrOrStderr(), err.Error())
				return exitError(exitDiffers)
			}
			if o.Act {
				fmt.Fprintln(o.Out, "Only the binaries of Podlace are left.")
			} else {
				fmt.Fprintln(o.Out, "Nothing was changed. --yes does it.")
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.Act, "yes", false, "do it")
	addConfDir(cmd, &folders)

	return cmd
}
