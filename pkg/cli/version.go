// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/plugin"
)

// commit is set by the Makefile with -ldflags -X. Another build has it in its version.
var commit string

// build describes the podlace binary and the running kernel.
type build struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
	Kernel  string `json:"kernel"`
}

func thisBuild() build {
	return build{
		Version: plugin.BuildVersion(),
		Commit:  cmp.Or(commit, "unknown"),
		Go:      runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH,
		Kernel:  kernelRelease(),
	}
}

func newVersion() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:     "version",
		Example: "  podlace version\n  podlace version -o json",
		Short:   "Show the version of this program, of Go and of the kernel",
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := thisBuild()
			return printAs(output, cmd.OutOrStdout(), b, func() {
				fmt.Fprintf(cmd.OutOrStdout(), "podlace %s\ncommit  %s\ngo      %s\nkernel  %s\n", b.Version, b.Commit, b.Go, b.Kernel)
			})
		},
	}
	addOutput(cmd, &output)
	return cmd
}

func kernelRelease() string {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return cmp.Or(strings.TrimSpace(string(release)), "unknown")
}
