// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

// newOfDaemon returns a command that runs the command of the same name of sriov-device-plugin, which links Kubernetes' libraries for it.
func newOfDaemon(use, short, example string) *cobra.Command {
	name, _, _ := strings.Cut(use, " ")
	return &cobra.Command{Use: use, DisableFlagsInUseLine: true, Short: short, Example: example, DisableFlagParsing: true,
		Long: short + ".\n\nThe command runs 'sriov-device-plugin " + name + "' with the same arguments; --help shows them.",
		RunE: func(cmd *cobra.Command, args []string) error {
			program, err := findDaemon()
			if err != nil {
				return err
			}
			run := exec.CommandContext(cmd.Context(), program, append([]string{name}, args...)...)
			run.Stdin, run.Stdout, run.Stderr = os.Stdin, cmd.OutOrStdout(), cmd.ErrOrStderr()
			err = run.Run()
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				return exitError(exit.ExitCode())
			}
			return err
		}}
}

func findDaemon() (string, error) {
	const daemon = "sriov-device-plugin"
	own, _ := os.Executable()
	for _, name := range []string{daemon, "/usr/local/bin/" + daemon, filepath.Join(filepath.Dir(own), daemon)} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("sriov-device-plugin, which does this, is neither in PATH nor in /usr/local/bin nor beside podlace")
}
