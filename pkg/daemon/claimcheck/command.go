// SPDX-License-Identifier: Apache-2.0

// Package claimcheck implements the commands check-claim and classes of sriov-device-plugin, which tell before a pod is created what
// the scheduler and the driver would make of its ResourceClaims. Kubernetes' own CEL environment and allocator give the answers.
package claimcheck

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/plugin"
)

// The exit statuses are those of podlace.
const (
	exitProblems = 1
	exitFailed   = 2
)

// errProblems reports that the command has printed what is wrong.
var errProblems = errors.New("the claims have problems")

type options struct {
	pool.Source
	sysfs, slices string
	classFiles    []string
	output        string
}

// Command returns the command line of sriov-device-plugin without the flags of the daemon.
func Command() *cobra.Command {
	root := &cobra.Command{Use: "sriov-device-plugin", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(newCheckClaim(), newClasses())
	return root
}

// Main runs the command in the first argument, or the daemon if there is no such command, and returns the exit status.
func Main(args []string, daemon func(args []string, stderr io.Writer) int) int {
	if status, ok := Run(args, os.Stdin, os.Stdout, os.Stderr); ok {
		return status
	}
	return daemon(args, os.Stderr)
}

// Run runs the command in the first argument and returns its exit status. known is false if there is no such command.
func Run(args []string, stdin io.Reader, stdout, stderr io.Writer) (status int, known bool) {
	root := Command()
	if cmd, _, err := root.Find(args); err != nil || cmd == root {
		return 0, false
	}
	stderr = plugin.PlainWriter(stderr)
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(plugin.PlainWriter(stdout))
	root.SetErr(stderr)
	switch err := root.Execute(); {
	case errors.Is(err, errProblems):
		return exitProblems, true
	case err != nil:
		fmt.Fprintln(stderr, "sriov-device-plugin:", err)
		return exitFailed, true
	}
	return 0, true
}

// addConfig adds the flags that select the configuration of the device plugin.
func (o *options) addConfig(cmd *cobra.Command) {
	host, _ := os.Hostname()
	poolfile.AddFlags(cmd.Flags().StringVar, &o.Source, cmp.Or(os.Getenv("NODE_NAME"), host, "localhost"))
	name := cmd.Flags().Lookup("node-name")
	name.DefValue, name.Usage = "$NODE_NAME", name.Usage+"; without NODE_NAME the host name"
}

// getCluster writes a file for --slices and --class.
const getCluster = "kubectl get resourceslices,deviceclasses -o json >cluster.json"

const checkClaimHelp = `Check the ResourceClaims, ResourceClaimTemplates, DeviceClasses, Pods and pod
templates in FILE as the scheduler and the node would handle them. The selectors
are compiled and evaluated, and the requests are allocated, by the code of
Kubernetes. For each request the command prints the VFs and their settings, merged
from the DeviceClass and the claim. FILE may be a folder, or - for standard input.

The devices are those that the device plugin would publish on this node, or those of
--slices. Without either, the command takes examples of VFs for each resource
of the configuration. It cannot check values and counts then, which a notice says.

DeviceClasses come from FILE and --class; for missing ones the command uses those
that 'sriov-device-plugin classes' prints.

Exit status: 0 without a problem, 1 with a problem, 2 if a file could not be read. A
notice describes what cannot be checked and does not change the exit status.`

func newCheckClaim() *cobra.Command {
	var o options
	cmd := &cobra.Command{Use: "check-claim FILE...", Short: "Check what the scheduler and the node would make of a claim, a template or a pod",
		Example: "  sriov-device-plugin check-claim pod.yaml\n" +
			"  " + getCluster + "\n  sriov-device-plugin check-claim pod.yaml --slices cluster.json --class cluster.json",
		Long: checkClaimHelp, Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			return o.check(cmd, files)
		}}
	o.addConfig(cmd)
	cmd.Flags().StringVar(&o.sysfs, "sysfs", "/sys", "where sysfs is mounted")
	cmd.Flags().StringVar(&o.slices, "slices", "", "file with the ResourceSlices of a cluster, in place of the devices of this node")
	cmd.Flags().StringArrayVar(&o.classFiles, "class", nil, "file or folder with DeviceClasses; may be given several times")
	cmd.Flags().StringVarP(&o.output, "output", "o", "table", "output format: table or json")
	return cmd
}

func (o *options) check(cmd *cobra.Command, files []string) error {
	if o.output != "table" && o.output != "json" {
		return fmt.Errorf("--output %q: want table or json", o.output)
	}
	config, err := poolfile.Read(o.Source)
	switch absent := errors.Is(err, fs.ErrNotExist) && !cmd.Flags().Changed("config-file"); {
	case absent && o.slices != "":
		config = &pool.Config{} // in a cluster, the nodes have no file: the daemon's pod gets it from a ConfigMap
	case absent:
		return fmt.Errorf("%w; without it, run '%s' and add --slices cluster.json --class cluster.json", err, getCluster)
	case err != nil:
		return err
	}
	c, err := newChecker(cmd.Context(), o, config)
	if err != nil {
		return err
	}
	err = c.read(cmd.InOrStdin(), o.classFiles, files)
	c.checkAll()
	if c.checked == 0 && len(c.problems) == 0 && err == nil {
		return fmt.Errorf("%s: nothing to check: want a ResourceClaim, ResourceClaimTemplate, DeviceClass, or a Pod with claims", strings.Join(files, ", "))
	}
	if err = errors.Join(err, c.print(o.output, cmd.OutOrStdout(), cmd.ErrOrStderr())); err == nil && len(c.problems) > 0 {
		return errProblems
	}
	return err
}

func (c *checker) print(format string, stdout, stderr io.Writer) error {
	if format == "json" {
		document, err := json.MarshalIndent(map[string]any{"requests": append([]served{}, c.served...),
			"problems": append([]string{}, c.problems...), "notices": append([]string{}, c.notices...)}, "", "  ")
		if err == nil {
			_, err = stdout.Write(append(plugin.PlainJSON(document), '\n'))
		}
		return err
	}
	var out bytes.Buffer
	for _, r := range c.served {
		fmt.Fprintf(&out, "%s: request %s: %s of %s by class %s\n", r.Object, r.Request, r.Devices, r.Resource, r.Class)
		for _, s := range r.Settings {
			fmt.Fprintf(&out, "  %s %s (%s)\n", s.Key, s.Value, s.From)
		}
	}
	_, err := out.WriteTo(stdout)
	for _, p := range c.problems {
		fmt.Fprintln(stderr, p)
	}
	for _, n := range c.notices {
		fmt.Fprintln(stderr, "notice: "+n)
	}
	return err
}
