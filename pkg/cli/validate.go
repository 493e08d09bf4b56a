// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/yamlfile"
)

const validateHelp = `Check files before a node uses them. FILE is a network configuration (.conflist,
.conf), the configuration of sriov-device-plugin, node.json, or a file of
Kubernetes objects. Of these the command checks NetworkAttachmentDefinitions,
ConfigMaps with such configurations, pods and pod templates. A folder stands for
its files; - is standard input.

Each line names file, line, column, key and, in brackets, a code that 'podlace
explain' explains. An error keeps a pod from starting, or stops the daemon; a warning
names a setting without the effect that it suggests. Networks of several files are
compared with one another; with --node, subnets and devices with this node.

--strict makes each warning an error.

Exit status: 0 without errors, 1 with an error, 2 if a file could not be read or a
folder has none.`

const validateExample = `  podlace validate /etc/cni/net.d
  podlace validate --strict conf/10-podlace.conflist pod.yaml
  kubectl get pods -A -o yaml | podlace validate -
  podlace validate --node -o json /etc/cni/net.d | jq`

func newValidate() *cobra.Command {
	var output string
	var thisNode, strict bool
	cmd := &cobra.Command{
		Use:     "validate FILE...",
		Short:   "Check network configurations, pools of VFs and manifests, with file, line, column and key",
		Long:    validateHelp,
		Example: validateExample,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validateFiles(cmd.InOrStdin(), cmd.OutOrStdout(), args, thisNode, strict, output)
		},
	}
	cmd.Flags().BoolVar(&thisNode, "node", false, "compare subnets and devices with this node")
	cmd.Flags().BoolVar(&strict, "strict", false, "make each warning an error, as for CI")
	addOutput(cmd, &output)
	return cmd
}

func validateFiles(stdin io.Reader, stdout io.Writer, names []string, thisNode, strict bool, output string) error {
	var node validate.Node
	var err error
	if thisNode {
		if node, err = validate.ThisNode(); err != nil {
			return err
		}
	}
	var files []yamlfile.File
	for _, name := range names {
		more, unread := yamlfile.Files(stdin, name)
		files, err = append(files, more...), errors.Join(err, unread)
	}
	problems := validate.Files(files, node)
	wrong := 0
	for i := range problems {
		if problems[i].Error = problems[i].Error || strict; problems[i].Error {
			wrong++
		}
	}
	err = errors.Join(err, printAs(output, stdout, append([]validate.Problem{}, problems...), func() {
		for _, p := range problems {
			fmt.Fprintln(stdout, plugin.Plain(p.String(), maxEvidence))
		}
		fmt.Fprintf(stdout, "files: %d, errors: %d, warnings: %d\n", len(files), wrong, len(problems)-wrong)
	}))
	if err == nil && wrong > 0 {
		err = exitError(exitDiffers)
	}
	return err
}
