// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

const sriovLsHelp = `List the network cards of this node, PFs and VFs: NUMA node, driver, the resource
that offers the VF, and the pod that has it. CPUS compares the pod's exclusive
CPUs with the NUMA node of the VF: same, other, mixed, or - if the pod shares its
CPUs. FAULT is the reason why a VF cannot be allocated at present.

The command asks the device plugin for pods and faults. If it does not answer,
the rest is listed, with a warning on standard error.

A second table lists the prepared ResourceClaims: claim, request, pod, VF, and
the VF's interface in the pod. INTERFACE is - until the CNI plugin attaches the
VF, and "admin" for admin access, which does not move the VF.`

const sriovExplainHelp = `Explain why each device is offered or not: what each selector of each resource
wants and what was found. DEVICE is a PCI address, or the name of an interface or
of a resource. Without it the command prints one line for each device.

With --count the command answers whether a container could get this many devices
of the resource now, together with --cpus exclusive CPUs and the devices of --with.
It prints the hints of each resource, a star for preferred ones, their merge by each
policy of the Topology Manager, and whether an idle node would be refused, too. It
thereby explains why a pod was refused, as long as the allocations are the same. With
the scope pod, give the sums over all containers. Hints of the Memory Manager and policy
options are ignored. Exit status: 1 if no policy admits the container.

Entries that are not supported come first, then resources of the configuration
for which this node has no device. With --strict an unsupported entry is an error.`

const sriovExplainExample = `  podlace sriov explain
  podlace sriov explain 0000:3b:02.1
  podlace sriov explain example.com/fast --count 2
  podlace sriov explain example.com/fast --count 2 --cpus 4 --with example.com/gpu=1 --policy restricted`

// askTimeout bounds the wait for the device plugin's answer.
const askTimeout = 10 * time.Second

// sriovFlags holds the flags for the device plugin's configuration and sockets.
type sriovFlags struct {
	pool.Source
	sysfs, socket string
	claims        string
	output        string
	request       requestFlags
}

func newSRIOV() *cobra.Command {
	cmd := &cobra.Command{Use: "sriov", Short: "Inspect the SR-IOV devices of this node", SuggestionsMinimumDistance: 1, RunE: showHelp}
	cmd.AddCommand(newSRIOVLs(), newSRIOVExplain(),
		newOfDaemon("classes [FLAG...]", "Print the DeviceClasses of the resources with \"api\": \"dra\"",
			"  podlace sriov classes\n  podlace sriov classes --config-file config.json"),
		newOfDaemon("check-claim FILE...", "Check what the scheduler and the node would make of a claim, a template or a pod",
			"  podlace sriov check-claim pod.yaml\n  podlace sriov check-claim pod.yaml --slices cluster.json --class cluster.json\n"+
				"  helm template chart | podlace sriov check-claim -"),
		newSRIOVReset(), newSRIOVResetFunction())
	return cmd
}

// addConfig adds the flags that select the device plugin's configuration.
func (f *sriovFlags) addConfig(cmd *cobra.Command) {
	host, _ := os.Hostname()
	poolfile.AddFlags(cmd.Flags().StringVar, &f.Source, host)
	cmd.Flags().Lookup("node-name").DefValue = "the host name" // man pages are the same on each build machine
}

// addNode adds the flags that select the configuration, sysfs and the device plugin.
func (f *sriovFlags) addNode(cmd *cobra.Command) {
	f.addConfig(cmd)
	cmd.Flags().StringVar(&f.sysfs, "sysfs", "/sys", "where sysfs is mounted")
	cmd.Flags().StringVar(&f.socket, "socket", poddevices.Socket, "socket of the device plugin")
	cmd.Flags().StringVar(&f.claims, "claims-dir", claim.Folder, "folder with the prepared claims")
}

func newSRIOVLs() *cobra.Command {
	var f sriovFlags
	cmd := &cobra.Command{Use: "ls", Short: "List PFs and VFs, the resources that offer them, and the pods that have them", Long: sriovLsHelp,
		Example: "  podlace sriov ls\n  podlace sriov ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.list(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		}}
	f.addNode(cmd)
	addOutput(cmd, &f.output)
	return cmd
}

func newSRIOVExplain() *cobra.Command {
	var f sriovFlags
	cmd := &cobra.Command{Use: "explain [DEVICE]", Short: "Explain why a device is offered or not, and whether a pod could get some",
		Example: sriovExplainExample,
		Long:    sriovExplainHelp, Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.request.check(cmd.Flags().Changed); err != nil {
				return err
			}
			return f.explain(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), strings.Join(args, ""))
		}}
	f.addNode(cmd)
	addOutput(cmd, &f.output)
	cmd.Flags().BoolVar(&f.Strict, "strict", false,
		"refuse a configuration with an unsupported entry, as sriov-device-plugin --strict")
	f.request.add(cmd)
	return cmd
}

// sriovNode holds the node's devices, as the device plugin sees them.
type sriovNode struct {
	config    *pool.Config
	snapshot  *pci.Snapshot
	env       pool.Env
	pools     []pool.Pool
	held      map[string]poddevices.Device
	claims    []sriovClaim
	faults    map[string]string
	slices    map[string]poddevices.Published // by PCI address
	pluginErr error                           // why pods and faults are unknown
	claimsErr error                           // why the list of claims is incomplete
	configErr error                           // why the configuration could not be read
}

func (f *sriovFlags) readNode(ctx context.Context) (*sriovNode, error) {
	n := &sriovNode{config: &pool.Config{}, held: map[string]poddevices.Device{}}
	config, err := poolfile.Read(f.Source)
	if n.configErr = err; err == nil {
		n.config = config
	} else if errors.Is(err, fs.ErrNotExist) && f.File != poolfile.Default { // which a node without the device plugin lacks
		return nil, err
	}
	if n.snapshot, n.env, err = poolfile.Scan(f.sysfs); err != nil {
		return nil, err
	}
	answer, err := askPlugin(ctx, f.socket, poddevices.Question{Published: true})
	for _, h := range answer.Devices {
		n.held[h.ID] = h
	}
	n.faults, n.slices, n.pluginErr = answer.Faults, answer.Published, err
	n.claims, n.claimsErr = f.readClaims()
	n.addClaimed()
	n.assignPools()
	return n, nil
}

// assignPools computes the pools as the device plugin does. A VF without a driver is faulty even if the device plugin does not run.
func (n *sriovNode) assignPools() {
	if n.pluginErr == nil {
		n.env.Held = pool.HeldBy(maps.Values(n.held))
	}
	faults := map[string]string{}
	n.pools = pool.Assign(n.config, n.snapshot, n.env)
	for i, p := range n.pools {
		n.pools[i].Devices = slices.DeleteFunc(p.Devices, func(d pool.Device) bool { return n.otherOwner(d.Address, p.Name) != nil })
		for _, d := range p.Devices {
			if d.Driver == "" {
				faults[d.Address.String()] = "no driver is bound"
			}
		}
	}
	maps.Copy(faults, n.faults)
	n.faults = faults
}

func askPlugin(ctx context.Context, socket string, q poddevices.Question) (poddevices.Answer, error) {
	var answer poddevices.Answer
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		answer, err = poddevices.Ask(socket, time.Now().Add(askTimeout), q)
	}()
	select {
	case <-done:
		return answer, err
	case <-ctx.Done():
		return poddevices.Answer{}, ctx.Err()
	}
}

// otherOwner returns the owner of a device that was allocated from another resource before the configuration moved it to the given one, or
// nil. The owner keeps it until its pod ends, so no other pod can get it.
func (n *sriovNode) otherOwner(device pci.Address, resource string) *poddevices.Device {
	if h, ok := n.held[device.String()]; ok && h.Resource != resource {
		return &h
	}
	return nil
}

// sriovDevice is one row in the list of devices.
type sriovDevice struct {
	pci.Device
	PFName   string             `json:"pfName,omitempty"`
	Resource string             `json:"resource,omitempty"`
	Holder   *poddevices.Device `json:"holder,omitempty"`
	Claims   []sriovClaim       `json:"claims,omitempty"`
	CPUs     string             `json:"cpus,omitempty"`  // same, other, mixed or ""
	Fault    string             `json:"fault,omitempty"` // reason why the device cannot be allocated
	Gone     bool               `json:"gone,omitempty"`  // a pod still has the device, but the node does not
}

func (f *sriovFlags) list(ctx context.Context, stdout, stderr io.Writer) error {
	n, err := f.readNode(ctx)
	if err != nil {
		return err
	}
	n.printGaps(stderr, true)
	list := n.devices()
	if f.output == outputJSON {
		return printJSON(stdout, list)
	}
	rows := [][]string{{"DEVICE", "PF", "VF", "NUMA", "DRIVER", "RESOURCE", "POD", "CPUS", "FAULT"}}
	for _, d := range list {
		vf, numa, pod := "-", "-", "-"
		switch {
		case d.IsVF():
			vf = strconv.Itoa(d.VFIndex)
		case d.TotalVFs > 0:
			vf = fmt.Sprintf("%d of %d", d.NumVFs, d.TotalVFs)
		}
		if d.NUMANode != pci.Unknown {
			numa = strconv.Itoa(d.NUMANode)
		}
		if d.Gone {
			d.Driver = "(gone)"
		}
		if d.Holder != nil {
			pod = n.holder(*d.Holder)
		}
		rows = append(rows, []string{d.Address.String(), dash(plain(d.PFName)), vf, numa, dash(plain(d.Driver)), dash(plain(d.Resource)),
			plain(pod), dash(d.CPUs), dash(plainText(d.Fault))})
	}
	printTable(stdout, rows)
	n.listClaims(stdout)
	return nil
}

// printGaps prints why resources, pods and claims are unknown. A node that needs no device plugin may have neither it nor its
// configuration.
func (n *sriovNode) printGaps(stderr io.Writer, needed bool) {
	if n.configErr != nil && (needed || !errors.Is(n.configErr, fs.ErrNotExist)) {
		printLine(stderr, n.configErr.Error())
	}
	if n.pluginErr != nil && needed {
		printLine(stderr, fmt.Sprintf("the device plugin did not say which pods have devices: %v", n.pluginErr))
	}
	if n.claimsErr != nil && (n.pluginErr == nil || !errors.Is(n.claimsErr, fs.ErrPermission)) {
		printLine(stderr, fmt.Sprintf("the list of claims is incomplete: %v", n.claimsErr))
	}
}

// devices returns each PF followed by its VFs, and at the end allocated devices that no longer exist.
func (n *sriovNode) devices() (list []sriovDevice) {
	offered := map[pci.Address]string{}
	for _, p := range n.pools {
		for _, d := range p.Devices {
			offered[d.Address] = p.Name
		}
	}
	add := func(d pci.Device, pfName string) {
		line := sriovDevice{Device: d, PFName: pfName, Resource: offered[d.Address], Fault: n.faults[d.Address.String()],
			Claims: n.claimsOf(d.Address)}
		if h, ok := n.held[d.Address.String()]; ok {
			line.Holder, line.CPUs, line.Resource = &h, n.compareCPUs(d, h.CPUs), cmp.Or(h.Resource, line.Resource)
		}
		list = append(list, line)
	}
	for _, d := range n.snapshot.Devices {
		if d.IsVF() {
			if _, ok := n.snapshot.Device(d.PF); !ok {
				add(d, "")
			}
			continue
		}
		name := strings.Join(d.Interfaces, ",")
		if d.HasNoPF() {
			name = ""
		}
		add(d, name)
		for _, vf := range n.snapshot.VFs(d.Address) {
			add(vf, name)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(n.held)) {
		a, err := pci.ParseAddress(id)
		if _, ok := n.snapshot.Device(a); err == nil && !ok {
			h := n.held[id]
			list = append(list, sriovDevice{Device: pci.Device{Address: a, NUMANode: pci.Unknown}, Resource: h.Resource, Holder: &h,
				Claims: n.claimsOf(a), Gone: true})
		}
	}
	return list
}

// compareCPUs compares the NUMA nodes of CPUs with a device's.
func (n *sriovNode) compareCPUs(d pci.Device, cpus []int64) string {
	same := 0
	for _, node := range n.snapshot.Nodes {
		for _, cpu := range node.CPUList() {
			if node.ID == d.NUMANode && slices.Contains(cpus, int64(cpu)) {
				same++
			}
		}
	}
	switch {
	case len(cpus) == 0 || d.NUMANode == pci.Unknown:
		return ""
	case same == len(cpus):
		return "same"
	case same == 0:
		return "other"
	}
	return "mixed"
}
