// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/ports"
)

const lsExample = `  podlace ls
  podlace ls -o wide
  podlace ls --ip 10.58.0.7
  podlace ls --hostport 53/udp -o json`

const lsHelp = `List the attachments that are recorded on this node, from the plugins' records
and host-local's leases. The last column is the state of the pod's network
namespace: alive, gone, or unknown when no record names it. Standard error lists
records that cannot be read.

Exit status: 0 if the attachments were listed, 2 if the command could not run, a record
cannot be read, or nothing belongs to the network of --network.`

// outputWide is the format of a table with more columns.
const outputWide = "wide"

// confFlags holds the flags that select network configurations.
type confFlags struct {
	doctor.Options
	named   bool // --conf-dir is given
	network string
	output  string
}

func (f *confFlags) add(cmd *cobra.Command, formats ...string) {
	addConfDir(cmd, &f.Options)
	cmd.PreRun = func(*cobra.Command, []string) { f.named, f.Options = f.ConfDir != "", doctor.Folders(f.Options) }
	cmd.Flags().StringVar(&f.network, "network", "", "only this network")
	addOutput(cmd, &f.output, formats...)
}

// addConfDir adds the flag for the configurations' folder, by default the runtime's.
func addConfDir(cmd *cobra.Command, o *doctor.Options) {
	cmd.Flags().StringVar(&o.ConfDir, "conf-dir", "", "folder with the network configurations (default: that of the runtime)")
	cmd.PreRun = func(*cobra.Command, []string) { *o = doctor.Folders(*o) }
}

func addBinDir(cmd *cobra.Command, o *doctor.Options) {
	cmd.Flags().StringVar(&o.BinDir, "bin-dir", "", "folder with the plugins (default: that of the runtime)")
}

// lsFlags holds the flags of 'podlace ls', which select the attachments and the format.
type lsFlags struct {
	confFlags
	ip, mac, hostPort string
	tests             []func(*reconcile.Attachment) bool
}

func newLs() *cobra.Command {
	var flags lsFlags
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the attachments that are recorded on this node",
		Long:    lsHelp,
		Example: lsExample,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.list(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags.add(cmd, outputTable, outputWide, outputJSON)
	cmd.Flags().StringVar(&flags.ip, "ip", "", "only the attachment with this address")
	cmd.Flags().StringVar(&flags.mac, "mac", "", "only the attachment with this MAC: of a VF, or with antiSpoof of a veth")
	cmd.Flags().StringVar(&flags.hostPort, "hostport", "", "only the attachment with this hostPort, such as 8080 or 53/udp")
	return cmd
}

func (f lsFlags) list(stdout, stderr io.Writer) error {
	if err := f.parse(); err != nil {
		return err
	}
	list, damaged, err := f.read(stderr)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(a *reconcile.Attachment) bool {
		return slices.ContainsFunc(f.tests, func(test func(*reconcile.Attachment) bool) bool { return !test(a) })
	})
	switch f.output {
	case outputJSON:
		err = printJSON(stdout, list)
	case outputWide:
		printAttachments(stdout, list, []string{"NAMESPACE", "AGE", "HOST SIDE", "HOSTPORTS", "INGRESS", "EGRESS", "VFS"}, wideCells)
	default:
		printAttachments(stdout, list, []string{"NAMESPACE"}, func(a *reconcile.Attachment) []string { return []string{a.State} })
	}
	return errors.Join(printDamaged(stderr, damaged), err)
}

// parse checks and parses the flags that select attachments.
func (f *lsFlags) parse() error {
	if f.ip != "" {
		ip, err := netip.ParseAddr(f.ip)
		if err != nil {
			return fmt.Errorf("--ip %q: want an address", f.ip)
		}
		f.tests = append(f.tests, func(a *reconcile.Attachment) bool { return slices.Contains(a.Addresses, ip.Unmap()) })
	}
	if f.mac != "" {
		mac, err := net.ParseMAC(f.mac)
		if err != nil {
			return fmt.Errorf("--mac %q: want a MAC such as 0a:58:0a:3a:00:07", f.mac)
		}
		f.tests = append(f.tests, func(a *reconcile.Attachment) bool {
			return slices.ContainsFunc(a.MACs, func(text string) bool {
				own, err := net.ParseMAC(text)
				return err == nil && bytes.Equal(own, mac)
			})
		})
	}
	if f.hostPort != "" {
		port, protocol, err := parseHostPort(f.hostPort)
		if err != nil {
			return err
		}
		f.tests = append(f.tests, func(a *reconcile.Attachment) bool {
			return slices.ContainsFunc(a.HostPorts, func(p ports.Port) bool {
				return p.Port <= port && port <= p.End() && (protocol == "" || protocol == p.Protocol)
			})
		})
	}
	return nil
}

// parseHostPort parses a port such as 8080 or 53/udp.
func parseHostPort(text string) (port uint16, protocol string, err error) {
	number, protocol, named := strings.Cut(strings.ToLower(text), "/")
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 || named && !slices.Contains([]string{"tcp", "udp", "sctp"}, protocol) {
		return 0, "", fmt.Errorf("--hostport %q: want a port such as 8080 or 53/udp", text)
	}
	return uint16(n), protocol, nil
}

// read returns the recorded attachments of the selected networks, with the records that cannot be read. The runtime's folder may be
// missing, as on k3s nodes, because records need no configuration.
func (f confFlags) read(stderr io.Writer) ([]*reconcile.Attachment, []attachment.Damaged, error) {
	networks, notes, err := configurations(f.ConfDir)
	switch {
	case err != nil && f.named:
		return nil, nil, err
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		notes = append(notes, err.Error())
	}
	for _, text := range notes {
		printLine(stderr, text)
	}
	records, damaged, err := attachment.Scan()
	if err != nil {
		return nil, nil, err
	}
	list, err := reconcile.ListOf(records, networks)
	if err == nil {
		err = f.checkNetwork(networks, list)
	}
	if err != nil {
		return nil, nil, err
	}
	damaged = damagedIn(f.network, damaged)
	return f.filterNetwork(reconcile.AddDamaged(list, damaged)), damaged, nil
}

func needRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("only root can read records and leases: run it as root")
	}
	return nil
}

// configurations reads all network configurations in a folder.
func configurations(dir string) (networks []reconcile.Network, notes []string, err error) {
	networks, notes, err = reconcile.Networks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: --conf-dir names the folder with the network configurations, on k3s /var/lib/rancher/k3s/agent/etc/cni/net.d", err)
	}
	return networks, notes, err
}

// checkNetwork returns an error if no configuration, record or lease has the network in --network.
func (f confFlags) checkNetwork(networks []reconcile.Network, list []*reconcile.Attachment) error {
	_, ok := reconcile.Named(networks, f.network)
	if ok || f.network == "" || slices.ContainsFunc(list, func(a *reconcile.Attachment) bool { return a.Network == f.network }) {
		return nil
	}
	return fmt.Errorf("--network %s: no configuration in %s, no record and no lease names this network", f.network, f.ConfDir)
}

// filterNetwork returns the attachments of the network in --network.
func (f confFlags) filterNetwork(list []*reconcile.Attachment) []*reconcile.Attachment {
	list = append([]*reconcile.Attachment{}, list...)
	return slices.DeleteFunc(list, func(a *reconcile.Attachment) bool { return f.network != "" && a.Network != f.network })
}

// printAttachments prints a line for each attachment. more returns the cells after the addresses.
func printAttachments(w io.Writer, list []*reconcile.Attachment, columns []string, more func(*reconcile.Attachment) []string) {
	rows := [][]string{append(append(nameHeads(), "ADDRESSES"), columns...)}
	for _, a := range list {
		cells := append(nameCells(a.Key(), a.Pod), dash(joined(a.Addresses)))
		for _, cell := range more(a) {
			cells = append(cells, dash(plain(cell)))
		}
		rows = append(rows, cells)
	}
	printTable(w, rows)
}

func wideCells(a *reconcile.Attachment) []string {
	host := a.HostInterface
	if a.Bridge != "" {
		host += "@" + a.Bridge
	}
	return []string{a.State, age(a.Since), host, hostPorts(a.HostPorts), limit(a.IngressRate), limit(a.EgressRate), strings.Join(a.VFs, " ")}
}

func nameHeads() []string { return []string{"NETWORK", "POD", "CONTAINER", "IFNAME"} }

// nameCells returns a row's first cells: network, pod, container and interface.
func nameCells(key attachment.Key, pod string) []string {
	return []string{plain(key.Network), dash(plain(pod)), plain(shortID(key.ContainerID)), dash(plain(key.IfName))}
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

// hostPorts formats ports as --hostport accepts them. A port that is mapped for both families is printed once.
func hostPorts(list []ports.Port) string {
	var texts []string
	for _, p := range list {
		number := fmt.Sprint(p.Port)
		if p.Last != 0 {
			number += fmt.Sprintf("-%d", p.Last)
		}
		if p.HostIP.IsValid() && !p.HostIP.IsUnspecified() {
			number = netip.AddrPortFrom(p.HostIP, p.Port).String()
		}
		texts = append(texts, number+"/"+p.Protocol)
	}
	slices.Sort(texts)
	return plain(strings.Join(slices.Compact(texts), " "))
}

func limit(rate uint64) string {
	if rate == 0 {
		return ""
	}
	return formatRate(rate)
}

// age formats the time since then in the largest unit with a number of at least two, as kubectl does.
func age(since time.Time) string {
	d := time.Since(since)
	switch {
	case since.IsZero() || d < 0:
		return ""
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}
