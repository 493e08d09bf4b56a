// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
)

const canaryHelp = `Run ADD, CHECK and DEL of the installed configuration for one pod on this node, as
the runtime does. Use it after an upgrade or a change of the configuration. The node
must reach a server in the pod, by the pod's addresses and by a hostPort, and limits of
20 Mbit/s must hold. What the configuration has no plugin for is not tried, and the
last line says so: CRI-O, for example, can map hostPorts itself. The pod is removed at
the end, also after a failure. It exists for about a second.

Exit status: 0 if what was tried works, 1 if a step failed, 2 if it could not run.`

const canaryExample = `  podlace canary
  podlace canary || echo 'put the old version back'
  podlace canary --conflist /etc/cni/net.d/10-podlace.conflist --plugins /opt/cni/bin -v`

type canaryFlags struct {
	plugins  string
	conflist string
	output   string
	verbose  bool
}

func newCanary() *cobra.Command {
	var f canaryFlags
	cmd := &cobra.Command{
		Use:     "canary",
		Short:   "Test the installed plugins and configuration with one pod on this node",
		Long:    canaryHelp,
		Example: canaryExample,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&f.plugins, "plugins", "", "folder with the plugins (default: that of the runtime)")
	cmd.Flags().StringVar(&f.conflist, "conflist", "", "configuration (default: the first in the runtime's folder)")
	cmd.Flags().BoolVarP(&f.verbose, "verbose", "v", false, "also print the time and the changes of each plugin, as podlace trace does")
	addOutput(cmd, &f.output)
	return cmd
}

// firstConflist returns the first network configuration in a folder, and a line for each file that runtimes cannot use.
func firstConflist(dir string) (file string, unusable []string, err error) {
	networks, notes, err := reconcile.Networks(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil, fmt.Errorf("%w: podlace doctor prints the command that installs a configuration; --conflist names another file", err)
	case err != nil:
		return "", nil, err
	case len(networks) > 0:
		return networks[0].File, notes, nil
	case len(notes) > 0:
		return "", nil, fmt.Errorf("no network configuration in %s can be used: %s", dir, strings.Join(notes, "; "))
	}
	return "", nil, fmt.Errorf("%s has no network configuration: name one with --conflist", dir)
}

func (f canaryFlags) run(ctx context.Context, stdout io.Writer) error {
	folders := doctor.Folders(doctor.Options{BinDir: f.plugins})
	f.plugins = folders.BinDir
	if info, err := os.Stat(f.plugins); err != nil || !info.IsDir() {
		return fmt.Errorf("there is no folder %s with plugins: name one with --plugins", f.plugins)
	}
	notes, err := []string(nil), error(nil)
	if f.conflist == "" {
		if f.conflist, notes, err = firstConflist(folders.ConfDir); err != nil {
			return err
		}
	}
	list, err := readConflist(f.conflist)
	if err != nil {
		return err
	}
	if err := os.MkdirAll("/run/netns", 0o755); err != nil { // as ip-netns(8) does
		return err
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // if the reader of stdout ends, writes fail, and the pod is still removed
	return f.test(ctx, list, notes, stdout)
}

// test runs the canary and prints its result.
func (f canaryFlags) test(ctx context.Context, list *chain.List, notes []string, stdout io.Writer) error {
	isTable := f.output != outputJSON
	if f.verbose || !isTable {
		if err := logChanges(); err != nil {
			return err
		}
	}
	pod, err := openTestPod(f.plugins, list, f.verbose && isTable, stdout)
	if err != nil {
		return err
	}
	c := canary{testPod: pod, notes: notes}
	err = errors.Join(c.test(ctx), c.remove(ctx))
	printed := printAs(f.output, stdout, pod.calls, func() {
		last := "canary: ok"
		for _, note := range c.notes {
			fmt.Fprintln(stdout, note)
			if feature, _, ok := strings.Cut(note, ": not tried"); ok {
				last += ", without " + feature
			}
		}
		if err == nil {
			fmt.Fprintln(stdout, last)
		}
	})
	if err != nil {
		printLine(stdout, fmt.Sprintf("the canary failed with %s and the plugins of %s: %v", f.conflist, f.plugins, err))
		return exitError(exitDiffers)
	}
	return printed
}

// canaryLimit limits the canary's pod in both directions, in bits per second.
const canaryLimit = 20_000_000

// canary is the pod of 'podlace canary'.
type canary struct {
	*testPod
	notes []string // among others, what was not tried
}

// test runs ADD and CHECK, and tries what the pod promises.
func (c *canary) test(ctx context.Context) error {
	stop, err := serve(c.space)
	if err != nil {
		return err
	}
	defer stop()
	if c.hasCapability("portMappings", "hostPort") {
		port, err := freePort()
		if err != nil {
			return err
		}
		c.Ports = []chain.PortMapping{{HostPort: port, ContainerPort: podPort, Protocol: "tcp"}}
	}
	if c.hasCapability("bandwidth", "limit") {
		c.Limit = canaryLimit
	}
	result, err := c.chain.Add(ctx, c.Attachment)
	if err != nil {
		return err
	}
	if err := c.tryTraffic(ctx, addressesOf(result)); err != nil {
		return err
	}
	return c.chain.Check(ctx, c.Attachment)
}

// hasCapability reports whether a plugin of the chain has a capability. If none has, it notes that the feature is not tried.
func (c *canary) hasCapability(capability, feature string) bool {
	if c.chain.Provides(capability) {
		return true
	}
	c.notes = append(c.notes, feature+": not tried, because no plugin of the configuration has the capability "+capability)
	return false
}

func addressesOf(result *types100.Result) (list []netip.Addr) {
	for _, ip := range result.IPs {
		addr, _ := netip.AddrFromSlice(ip.Address.IP)
		if !addr.IsLoopback() { // the node has such an address itself
			list = append(list, addr.Unmap())
		}
	}
	return list
}

func (c *canary) tryTraffic(ctx context.Context, pod []netip.Addr) error {
	for _, addr := range pod {
		err := ask(ctx, netip.AddrPortFrom(addr, podPort))
		if err != nil && c.isIsolated(addr) {
			c.notes = append(c.notes, fmt.Sprintf("traffic: not tried, because no link of the node is in the subnet of %s (isGateway): %v", addr, err))
			return nil
		}
		if err != nil {
			return fmt.Errorf("the pod's address %s: %w", addr, err)
		}
	}
	if len(pod) == 0 {
		c.notes = append(c.notes, "traffic: not tried, because the configuration gives no addresses")
		return nil
	}
	for _, m := range c.Ports {
		node, err := nodeAddress(pod[0])
		if err == nil {
			err = ask(ctx, netip.AddrPortFrom(node, uint16(m.HostPort)))
		}
		if err != nil {
			return fmt.Errorf("hostPort %d: %w", m.HostPort, err)
		}
	}
	if c.Limit == 0 {
		return nil
	}
	return tryLimit(ctx, netip.AddrPortFrom(pod[0], podPort), c.Limit)
}

// isIsolated reports whether the node cannot reach the pod by its configuration: without isGateway, it has no address on the bridge.
func (c *canary) isIsolated(pod netip.Addr) bool {
	own, err := net.InterfaceAddrs()
	isNear := func(a net.Addr) bool { p, ok := a.(*net.IPNet); return ok && p.Contains(pod.AsSlice()) }
	isBridged := func(name string) bool { return plugin.Runs(name, "bridge") && !gatewayKey.Match(c.chain.List.Bytes) }
	return err == nil && slices.ContainsFunc(chain.PluginsOf(c.chain.List), isBridged) && !slices.ContainsFunc(own, isNear)
}

// gatewayKey matches a true isGateway and isDefaultGateway, perhaps misspelt.
var gatewayKey = regexp.MustCompile(`(?i)"is\w*gat\w*"\s*:\s*true`)
