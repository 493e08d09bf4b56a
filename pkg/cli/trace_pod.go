// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/doctor"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
)

// tracedPod is a running pod's attachment, with all plugins in its configuration.
type tracedPod struct {
	attachment.Key
	Pod       string           `json:"pod,omitempty"`
	Netns     string           `json:"netns,omitempty"`
	Plugins   []tracedPlugin   `json:"plugins"`
	Unchecked string           `json:"unchecked,omitempty"` // why no CHECK ran
	Rules     []doctor.Finding `json:"rules,omitempty"`     // whether the kernel has the recorded rules, unless each CHECK succeeded

	records map[string]attachment.Record // by plugin
}

// tracedPlugin is one plugin of the attachment, with its CHECK's result and the objects that it created.
type tracedPlugin struct {
	chain.Call
	Objects []string `json:"objects,omitempty"`
}

// isFile reports whether the argument of 'podlace trace' names a configuration file; otherwise it is a pod.
func isFile(argument string) bool {
	if slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(argument)) || strings.HasPrefix(argument, "/") {
		return true
	}
	_, err := os.Stat(argument)
	return err == nil
}

// tracePod runs CHECK for all plugins of a running pod.
func (f traceFlags) tracePod(ctx context.Context, name string, stdout io.Writer) error {
	if f.hostPort != 0 || f.limit != "" {
		return errors.New("--hostport and --limit belong to the new pod of a CONFLIST, and not to a running pod")
	}
	if err := needRoot(); err != nil {
		return err
	}
	all, _, err := attachment.Scan()
	if err != nil {
		return err
	}
	records, err := recordsOfPod(all, name)
	if err != nil {
		return err
	}
	folders := doctor.Folders(doctor.Options{BinDir: f.plugins})
	networks, _, err := reconcile.Networks(folders.ConfDir) // without a configuration, the records still contain the objects
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	list := partsOf(records)
	if err := logChanges(); err != nil {
		return err
	}
	for _, p := range list {
		if err := p.check(ctx, folders.BinDir, f.cache, networks); err != nil {
			return err
		}
	}
	err = printAs(f.output, stdout, list, func() { printPods(stdout, list) })
	if err == nil && slices.ContainsFunc(list, (*tracedPod).failed) {
		err = exitError(exitDiffers)
	}
	return err
}

// partsOf groups a pod's records, of which each plugin has its own, by attachment.
func partsOf(records []attachment.Record) (list []*tracedPod) {
	for _, rec := range records {
		i := slices.IndexFunc(list, func(p *tracedPod) bool { return p.Key == rec.Key })
		if i < 0 {
			i = len(list)
			list = append(list, &tracedPod{Key: rec.Key, Pod: rec.Pod, Netns: rec.Netns, records: map[string]attachment.Record{}})
		}
		list[i].records[rec.Plugin] = rec
	}
	slices.SortFunc(list, func(a, b *tracedPod) int {
		return cmp.Or(cmp.Compare(a.ContainerID, b.ContainerID), cmp.Compare(a.IfName, b.IfName), cmp.Compare(a.Network, b.Network))
	})
	return list
}

// check runs CHECK of each plugin, and adds the objects in its record to p.Plugins. If libcni's cache lacks the attachment, only the
// objects are listed.
func (p *tracedPod) check(ctx context.Context, plugins, cache string, networks []reconcile.Network) error {
	recorded := chain.Recorded{Plugins: plugins, Cache: cache,
		Network: p.Network, ContainerID: p.ContainerID, IfName: p.IfName, Netns: p.Netns}
	err := recorded.Check(ctx, nil, func(c chain.Call) { p.Plugins = append(p.Plugins, tracedPlugin{Call: c}) })
	if err != nil {
		p.Unchecked = err.Error()
	}
	for _, kind := range []string{"bridge", "sriov", "portmap", "bandwidth"} {
		rec, ok := p.records[kind]
		if !ok {
			continue
		}
		objects, err := reconcile.Objects(rec)
		if err != nil {
			return fmt.Errorf("the record of %s for %s: %w", kind, nameOf(rec), err)
		}
		i := p.indexOf(kind) // call this before reading p.Plugins, because indexOf may extend the list
		p.Plugins[i].Objects = append(p.Plugins[i].Objects, objects...)
	}
	leases, err := reconcile.LeaseFiles(networks, p.Key)
	if len(leases) > 0 && len(p.Plugins) > 0 {
		p.Plugins[0].Objects = append(p.Plugins[0].Objects, leases...) // the main plugin runs the IPAM plugin
	}
	if err == nil && p.failed() {
		p.Rules, err = doctor.Examine(doctor.Options{}, "rules")
	}
	return err
}

// indexOf returns the index of a plugin in p.Plugins. It adds an entry if no CHECK of the plugin ran.
func (p *tracedPod) indexOf(kind string) int {
	i := slices.IndexFunc(p.Plugins, func(t tracedPlugin) bool { return plugin.Runs(t.Plugin, kind) })
	if i < 0 {
		i = len(p.Plugins)
		p.Plugins = append(p.Plugins, tracedPlugin{Call: chain.Call{Plugin: kind}})
	}
	return i
}

// failed reports whether a plugin's CHECK failed, or none ran.
func (p *tracedPod) failed() bool {
	return p.Unchecked != "" || slices.ContainsFunc(p.Plugins, func(t tracedPlugin) bool { return t.Error != "" })
}

func printPods(w io.Writer, list []*tracedPod) {
	for i, p := range list {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "network %s: %s of %s, container %s, namespace %s\n", plain(p.Network), plain(p.IfName), dash(plain(p.Pod)),
			plain(p.ContainerID), dash(plain(p.Netns)))
		if p.Unchecked != "" {
			fmt.Fprintf(w, "no CHECK ran: %s\n", plugin.Plain(p.Unchecked, maxEvidence))
		}
		printLevel(w, p.Rules, doctor.Error)
		for _, t := range p.Plugins {
			t.print(w)
		}
	}
}

func (t tracedPlugin) print(w io.Writer) {
	if t.Verb == "" {
		fmt.Fprintf(w, "%-6s %-12s\n", "-", plain(t.Plugin))
	} else {
		result := "ok"
		if t.Error != "" {
			result = "failed: " + plugin.Plain(t.Error, maxEvidence)
		}
		fmt.Fprintf(w, "%-6s %-12s %7.1f ms  %s\n", t.Verb, plain(t.Plugin), milliseconds(t.Took), result)
	}
	printPhases(w, t.Call)
	for _, line := range t.Objects {
		fmt.Fprintf(w, "         %s\n", plugin.Plain(line, maxEvidence))
	}
}
