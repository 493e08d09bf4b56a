// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
)

const lsExample = `  podlace ls
  podlace ls -o wide
  podlace ls --ip 10.58.0.7
  podlace ls --hostport 53/udp -o json`

const lsHelp = `List the attachments that are recorded on this node, from the plugins' records
and host-local's leases. The last column is the state of the pod's network
namespace: alive, gone, or unknown when no record names it. Standard error lists
valid configuration keys that do not have the effect that they suggest.`

// confFlags contains the values of the flags that select network configurations.
type confFlags struct {
	dir     string
	named   bool // --conf-dir is given
	network string
	output  string
}

func (f *confFlags) add(cmd *cobra.Command) {
	addConfDir(cmd, &f.dir)
	cmd.PreRun = func(*cobra.Command, []string) { fillFolders(doctor.Folders, &f.dir, nil) }
	cmd.Flags().StringVar(&f.network, "network", "", "only this network")
	addOutput(cmd, &f.output)
}

func addConfDir(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "conf-dir", "", "folder with the network configurations (default: that of the runtime)")
}

// fillFolders sets each empty path to the folder that the container runtime uses. Each of the pointers confDir and binDir may be nil.
func fillFolders(runtime func() doctor.Options, confDir, binDir *string) {
	isEmpty := func(dir *string) bool { return dir != nil && *dir == "" }
	if !isEmpty(confDir) && !isEmpty(binDir) {
		return
	}
	folders := runtime()
	if isEmpty(confDir) {
		*confDir = folders.ConfDir
	}
	if isEmpty(binDir) {
		*binDir = folders.BinDir
	}
}

// lsFlags contains the values of the flags of 'podlace ls', which select the attachments and the output format.
type lsFlags struct {
	confFlags
	ip, mac, hostPort string
	wanted            func(*reconcile.Attachment) bool
}

func newLs() *cobra.Command {
	var flags lsFlags
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the attachments that are recorded on this node",
		Long:    lsHelp,
		Example: lsExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags.named = cmd.Flags().Changed("conf-dir")
			return flags.list(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags.add(cmd)
	cmd.Flags().Lookup("output").Usage = "output format: table, wide or json"
	cmd.Flags().StringVar(&flags.ip, "ip", "", "only the attachment with this address")
	cmd.Flags().StringVar(&flags.mac, "mac", "", "only the attachment with this MAC: of a VF, or with antiSpoof of a veth")
	cmd.Flags().StringVar(&flags.hostPort, "hostport", "", "only the attachment with this hostPort, such as 8080 or 53/udp")
	return cmd
}

func (f lsFlags) list(stdout, stderr io.Writer) error {
	wide := f.output == outputWide
	if wide {
		f.output = outputTable
	}
	err := f.parse()
	if err == nil {
		err = f.check()
	}
	if err != nil {
		return err
	}
	networks, err := f.networks(stderr)
	if err != nil {
		return err
	}
	for _, text := range f.findings(networks) {
		printLine(stderr, text)
	}
	list, damaged, err := f.attachments(networks)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(a *reconcile.Attachment) bool { return !f.wanted(a) })
	switch {
	case f.output == outputJSON:
		err = printJSON(stdout, list)
	case wide:
		err = wideTable(stdout, list, time.Now())
	default:
		err = table(stdout, "NETWORK\tPOD\tCONTAINER\tIFNAME\tADDRESSES\tNAMESPACE", list,
			func(a *reconcile.Attachment) string { return a.State })
	}
	return errors.Join(printDamaged(stderr, damaged), err)
}

// networks() reads the network configurations. The default folder may be missing, as on k3s nodes. If the folder is missing, 'podlace ls'
// still lists the attachments that have records.
func (f confFlags) networks(stderr io.Writer) ([]reconcile.Network, error) {
	networks, notes, err := configurations(f.dir)
	switch {
	case err != nil && f.named:
		return nil, err
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		notes = append(notes, err.Error())
	}
	for _, text := range notes {
		printLine(stderr, text)
	}
	return networks, nil
}

// attachments() returns the recorded attachments of the selected networks, and the records that cannot be read.
func (f confFlags) attachments(networks []reconcile.Network) ([]*reconcile.Attachment, []attachment.Damaged, error) {
	list, err := reconcile.List(networks)
	if err != nil {
		return nil, nil, err
	}
	if err := f.checkNetwork(networks, list); err != nil {
		return nil, nil, err
	}
	damaged, err := attachment.Unreadable()
	if err != nil {
		return nil, nil, err
	}
	damaged = slices.DeleteFunc(damaged, func(d attachment.Damaged) bool { return f.network != "" && d.Network != f.network })
	return f.filterNetwork(reconcile.AddDamaged(list, damaged)), damaged, nil
}

func (f confFlags) check() error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	return needRoot()
}

func needRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("only root can read records and leases: run it as root")
	}
	return nil
}

// configurations() reads all network configurations in a folder.
func configurations(dir string) (networks []reconcile.Network, notes []string, err error) {
	networks, notes, err = reconcile.Networks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: --conf-dir names the folder with the network configurations, on k3s /var/lib/rancher/k3s/agent/etc/cni/net.d", err)
	}
	return networks, notes, err
}

// findings() returns the problems in the networks' configurations, one problem in each line.
func (f confFlags) findings(networks []reconcile.Network) (lines []string) {
	node, err := validate.ThisNode()
	if err != nil {
		lines = append(lines, fmt.Sprintf("the node's subnets cannot be compared with the configurations: %v", err))
	}
	for _, n := range networks {
		if f.network != "" && n.Name != f.network {
			continue
		}
		for _, finding := range validate.Config(n.Text, node) {
			lines = append(lines, n.File+": "+finding.String())
		}
	}
	return lines
}

// checkNetwork returns an error if no configuration, record or lease contains the network in the flag --network.
func (f confFlags) checkNetwork(networks []reconcile.Network, list []*reconcile.Attachment) error {
	if f.network == "" || slices.ContainsFunc(networks, func(n reconcile.Network) bool { return n.Name == f.network }) ||
		slices.ContainsFunc(list, func(a *reconcile.Attachment) bool { return a.Network == f.network }) {
		return nil
	}
	return fmt.Errorf("--network %s: no configuration in %s, no record and no lease names this network", f.network, f.dir)
}

// filterNetwork returns those attachments that belong to the network in the flag --network.
func (f confFlags) filterNetwork(list []*reconcile.Attachment) []*reconcile.Attachment {
	list = append([]*reconcile.Attachment{}, list...)
	return slices.DeleteFunc(list, func(a *reconcile.Attachment) bool { return f.network != "" && a.Network != f.network })
}

// table() prints a table with one line for each attachment. The function `last` returns the text for the last column of an attachment.
func table(w io.Writer, heading string, list []*reconcile.Attachment, last func(*reconcile.Attachment) string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, heading)
	for _, a := range list {
		cells := append(nameCells(a.Network, a.Pod, a.ContainerID, a.IfName), dash(joined(a.Addresses)), plain(last(a)))
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// nameCells returns the first cells of a table row: the network, the pod, the container and the interface.
func nameCells(network, pod, containerID, ifName string) []string {
	return []string{plain(network), dash(plain(pod)), plain(shortID(containerID)), dash(plain(ifName))}
}

func plain(name string) string { return plugin.Plain(name, reconcile.MaxName) }

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// shortID shortens a container ID to the length that crictl prints.
func shortID(id string) string { return id[:min(len(id), 13)] }

func joined(addresses []netip.Addr) string {
	list := make([]string, len(addresses))
	for i, a := range addresses {
		list[i] = plain(a.String()) // the zone of an address can be any text
	}
	return strings.Join(list, " ")
}
