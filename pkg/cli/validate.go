// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

const validateHelp = `Check files before a node uses them. FILE is a network configuration (.conflist,
.conf), the configuration of sriov-device-plugin, node.json, or a file of
Kubernetes objects. Of these the command checks NetworkAttachmentDefinitions,
ConfigMaps with such configurations, pods and pod templates. A folder stands for
its files; - is standard input.

Each line names file, line, column, key and, in brackets, a code that 'podlace
explain' explains. An error keeps a pod from starting, or stops
the daemon; a warning names a setting without the effect that it suggests. Networks
of several files are compared with one another.

With --node the subnets are compared with those of this node.

Exit status: 0 without errors, 1 with an error, 2 if a file could not be read.`

const validateExample = `  podlace validate /etc/cni/net.d
  podlace validate conf/10-podlace.conflist pod.yaml
  kubectl get pods -A -o yaml | podlace validate -
  podlace validate --node -o json /etc/cni/net.d | jq`

func newValidate() *cobra.Command {
	var output string
	var thisNode bool
	cmd := &cobra.Command{
		Use:     "validate FILE...",
		Short:   "Check network configurations, pools of VFs and manifests, with file, line, column and key",
		Long:    validateHelp,
		Example: validateExample,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return validateFiles(cmd.InOrStdin(), cmd.OutOrStdout(), args, thisNode, output)
		},
	}
	cmd.Flags().BoolVar(&thisNode, "node", false, "compare the subnets with those of this node")
	addOutput(cmd, &output)
	return cmd
}

func validateFiles(stdin io.Reader, stdout io.Writer, names []string, thisNode bool, output string) error {
	var node validate.Node
	var err error
	if thisNode {
		if node, err = validate.ThisNode(); err != nil {
			return err
		}
	}
	var files []validate.File
	for _, name := range names {
		more, err := readFiles(stdin, name)
		if err != nil {
			return err
		}
		files = append(files, more...)
	}
	problems := validate.Files(files, node)
	errors := 0
	for _, p := range problems {
		if p.Error {
			errors++
		}
	}
	if output == outputJSON {
		err = printJSON(stdout, append([]validate.Problem{}, problems...))
	} else {
		for _, p := range problems {
			fmt.Fprintln(stdout, plugin.Plain(p.String(), maxEvidence))
		}
		fmt.Fprintf(stdout, "files: %d, errors: %d, warnings: %d\n", len(files), errors, len(problems)-errors)
	}
	if err == nil && errors > 0 {
		err = exitError(exitDiffers)
	}
	return err
}

// maxStdin is the maximum size of standard input in bytes. The descriptions of all pods in a large cluster fit into this size.
const maxStdin = 256 << 20

// readAtMost reads at most the given number of bytes. For a longer text, readAtMost returns an error, because checking only the beginning
// could miss errors in the rest.
func readAtMost(from io.Reader, most int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(from, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("standard input is longer than %d bytes: check the objects of each namespace by themselves", most)
	}
	return data, err
}

// readFiles reads one file, all files in a folder, or standard input.
func readFiles(stdin io.Reader, name string) ([]validate.File, error) {
	if name == "-" {
		data, err := readAtMost(stdin, maxStdin)
		return []validate.File{{Name: "stdin", Data: data}}, err
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	names := []string{name}
	if info.IsDir() {
		entries, err := os.ReadDir(name)
		if err != nil {
			return nil, err
		}
		names = nil
		for _, e := range entries { // those that container runtimes or kubectl would read
			if slices.Contains([]string{".conflist", ".conf", ".json", ".yaml", ".yml"}, filepath.Ext(e.Name())) && !e.IsDir() {
				names = append(names, filepath.Join(name, e.Name()))
			}
		}
	}
	var files []validate.File
	for _, name := range names {
		data, err := store.ReadFile(name)
		if err != nil {
			return nil, err
		}
		files = append(files, validate.File{Name: name, Data: data})
	}
	return files, nil
}
