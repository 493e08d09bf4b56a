// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/rollback"
)

const rollbackHelp = `Rewrite the state of running pods into the form of the reference plugins, and
remove Podlace's own state: tables and records. From then on the reference plugins
delete these pods. The pods' traffic continues.

Install the reference plugins first: pods that Podlace adds later would not be
rewritten, so the command refuses while pods run and a configuration names a
plugin of Podlace. Without --yes it changes nothing.

Exit status: 0 if everything was done or printed, 1 if state of Podlace remains or
would remain, 2 if the command could not run.`

func newRollback() *cobra.Command {
	var folders doctor.Options
	var o rollback.Options
	cmd := &cobra.Command{
		Use:     "rollback",
		Example: "  podlace rollback\n  podlace rollback --yes",
		Short:   "Hand running pods over to the reference plugins",
		Long:    rollbackHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			o.ConfDir, o.BinDir = folders.ConfDir, folders.BinDir
			if o.Networks, o.Damaged, err = configurations(o.ConfDir); err != nil {
				return err
			}
			for _, text := range o.Damaged {
				printLine(cmd.ErrOrStderr(), text)
			}
			o.Out = cmd.OutOrStdout()
			err = rollback.Run(o)
			switch {
			case !o.Act:
				fmt.Fprintln(o.Out, "Nothing was changed. --yes does it.")
			case err == nil:
				fmt.Fprintln(o.Out, "Only the binaries of Podlace are left.")
			}
			if errors.Is(err, rollback.ErrRemains) {
				err = errors.Join(err, exitError(exitDiffers))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Act, "yes", false, "rewrite the state of the pods, and remove that of Podlace")
	addConfDir(cmd, &folders)
	addBinDir(cmd, &folders)
	return cmd
}
