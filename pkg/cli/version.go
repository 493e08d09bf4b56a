// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"io"
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
			return thisBuild().print(cmd.OutOrStdout(), output)
		},
	}
	addOutput(cmd, &output)
	return cmd
}

func (b build) print(w io.Writer, output string) error {
	return printAs(output, w, b, func() {
		fmt.Fprintf(w, "podlace %s\ncommit  %s\ngo      %s\nkernel  %s\n", b.Version, b.Commit, b.Go, b.Kernel)
	})
}

func kernelRelease() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(release))
}
