// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
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
		more, unread := readFiles(stdin, name)
		files, err = append(files, more...), errors.Join(err, unread)
	}
	problems := validate.Files(files, node)
	wrong := 0
	for _, p := range problems {
		if p.Error {
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

// readFiles reads one file, all files in a folder, or standard input. With an error it returns the files that it could read.
func readFiles(stdin io.Reader, name string) (files []validate.File, err error) {
	if name == "-" {
		data, err := readAtMost(stdin, maxStdin)
		if err != nil {
			return nil, err
		}
		return []validate.File{{Name: "stdin", Data: data}}, nil
	}
	names := []string{name}
	if info, statErr := os.Stat(name); statErr == nil && info.IsDir() {
		names = nil
		var entries []os.DirEntry
		entries, err = os.ReadDir(name)
		for _, e := range entries { // those that container runtimes or kubectl would read
			if slices.Contains([]string{".conflist", ".conf", ".json", ".yaml", ".yml"}, filepath.Ext(e.Name())) && !e.IsDir() {
				names = append(names, filepath.Join(name, e.Name()))
			}
		}
	}
	for _, name := range names {
		data, unread := store.ReadFile(name)
		if err = errors.Join(err, unread); unread == nil {
			files = append(files, validate.File{Name: name, Data: data})
		}
	}
	return files, err
}
