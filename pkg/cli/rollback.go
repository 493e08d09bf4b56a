// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/rollback"
)

func newRollback() *cobra.Command {
	o := rollback.Options{}
	cmd := &cobra.Command{
		Use:   "rollback",
		Short: "Give the pods that run to the reference plugins",
		Long: `Rewrites what Podlace made for the pods that run into the form of the reference plugins, and removes what is Podlace's own: tables,
index, records. From then on the reference plugins delete these pods. Their traffic goes on.

Put the files of the reference in place first: pods that Podlace adds later would not be rewritten. Without --yes nothing is changed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needRoot(); err != nil {
				return err
			}
			var err error
			if o.Networks, o.Damaged, err = configurations(o.ConfDir); err != nil {
				return err
			}
			for _, text := range o.Damaged {
				tell(cmd.ErrOrStderr(), text)
			}
			o.Out = cmd.OutOrStdout()
			if err := rollback.Run(o); err != nil {
				tell(cmd.ErrOrStderr(), err.Error())
				return exitError(exitMissed)
			}
			if o.Act {
				fmt.Fprintln(o.Out, "Nothing of Podlace is left but its binaries.")
			} else {
				fmt.Fprintln(o.Out, "Nothing was changed. --yes does it.")
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.Act, "yes", false, "do it")
	cmd.Flags().StringVar(&o.ConfDir, "conf-dir", "/etc/cni/net.d", "folder with the runtime's configurations")
	return cmd
}
