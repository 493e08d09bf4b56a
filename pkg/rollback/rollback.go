// SPDX-License-Identifier: Apache-2.0

// Package rollback rewrites what Podlace has made on a node for the pods that run into the form of the reference plugins, and removes what is
// Podlace's own. From then on the reference deletes these pods and nothing is left. Packets of the pods pass all the time: what replaces
// comes before what is replaced goes, and connections keep their translation.
//
// Each step may be done twice, and records go last: after a failure or a kill the next run completes the work.
package rollback

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

// Options say what to do.
type Options struct {
	ConfDir string // where the runtime's configurations are
	Act     bool   // false: only tell
	Out     io.Writer
}

type job struct {
	Options
	host    *kernel.Node
	seen    map[attachment.Key]bool
	indexes map[[2]string]bool // network and data folder
	failed  int
	state   bool // there is a state folder
}

// Run tells, or does and tells, all that it takes. An error means that something of Podlace is left.
func Run(o Options) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	_, missing := os.Stat(store.Root)
	if o.Act {
		unlock, err := only()
		if err != nil {
			return err
		}
		defer unlock()
	}
	j := &job{Options: o, host: host, seen: map[attachment.Key]bool{}, indexes: map[[2]string]bool{}, state: missing == nil}
	networks, err := attachment.Networks()
	if err != nil {
		return err
	}
	for _, network := range networks {
		if err := j.network(network); err != nil {
			return err
		}
	}
	if j.failed > 0 {
		return fmt.Errorf("%d pods could not be rewritten: the tables and records of Podlace stay, run it again", j.failed)
	}
	return j.node()
}

// only keeps a second run out.
func only() (unlock func(), err error) {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return nil, err
	}
	lock, err := dir.Lock(".rollback", 0o600)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return func() { lock.Unlock(); dir.Close() }, nil
}

func (j *job) network(network string) error {
	attachments, unreadable, err := attachment.Attachments(network)
	if err != nil {
		return err
	}
	for _, name := range unreadable {
		fmt.Fprintf(j.Out, "network %s: %s is no record that this version can read; what it names is not rewritten\n", network, name)
		j.failed++
	}
	conf, err := findConfiguration(j.ConfDir, network)
	if err != nil {
		return err
	}
	j.indexes[[2]string{network, conf.dataDir()}] = true
	for _, key := range attachment.Sorted(attachments) {
		j.seen[key] = true
		j.rewrite(key, conf)
	}
	return nil
}

// rewrite tells and does what an attachment needs, under its lock.
func (j *job) rewrite(key attachment.Key, conf configuration) {
	err := func() error {
		if j.Act {
			lock, err := attachment.LockKey(key)
			if err != nil {
				return err
			}
			defer lock.Close()
		}
		all, _, err := attachment.Attachments(key.Network)
		if err != nil || all[key] == nil {
			return err // its DEL was faster
		}
		steps, err := j.steps(key, all, conf)
		fmt.Fprintf(j.Out, "pod %s: container %s, %s in network %s\n", podOf(all[key]), key.ContainerID, key.IfName, key.Network)
		return errors.Join(err, j.do(steps))
	}()
	if err != nil {
		j.failed++
		fmt.Fprintf(j.Out, "  FAILED: %v\n", err)
	}
}

func podOf(records map[string]attachment.Record) string {
	for _, rec := range records {
		if rec.Pod != "" {
			return rec.Pod
		}
	}
	return "(no name)"
}

func (j *job) do(steps []attachment.Step) error {
	if len(steps) == 0 {
		fmt.Fprintln(j.Out, "  nothing to rewrite")
	}
	for _, s := range steps {
		fmt.Fprintf(j.Out, "  %s\n", s.Text)
		if !j.Act || s.Do == nil {
			continue
		}
		if err := s.Do(); err != nil {
			return err
		}
	}
	return nil
}

func (j *job) steps(key attachment.Key, all map[attachment.Key]map[string]attachment.Record, conf configuration) ([]attachment.Step, error) {
	records := all[key]
	alive, err := j.alive(key, records)
	if err != nil {
		return nil, err
	}
	if !alive {
		return []attachment.Step{j.bury(key, records)}, nil
	}
	addresses, err := addressesOf(key, all)
	if err != nil {
		return nil, err
	}
	var steps []attachment.Step
	if rec, ok := records["bridge"]; ok {
		of, err := bridge.FromRecord(rec)
		if err != nil {
			return nil, err
		}
		j.indexes[[2]string{key.Network, of.DataDir}] = true
		if steps, err = bridge.ToReference(j.host, rec, addresses, conf.plugin("bridge")); err != nil {
			return nil, err
		}
	}
	if rec, ok := records["portmap"]; ok {
		more, err := portmap.ToReference(j.host, rec, addresses, conf.plugin("portmap"))
		if err != nil {
			return nil, err
		}
		steps = append(steps, more...)
	}
	if rec, ok := records["bandwidth"]; ok {
		name, shared, err := bandwidth.Device(rec)
		if err != nil {
			return nil, err
		}
		if name != "" && !shared {
			steps = append(steps, attachment.Step{Text: "NOTE: the reference will not delete the device " + name + ": it has one for each container"})
		}
	}
	return steps, nil
}

// alive tells whether the interface of an attachment still exists. Where another main plugin made it, the pod's namespace tells: the
// interface must have an address that ports lead to.
func (j *job) alive(key attachment.Key, records map[string]attachment.Record) (bool, error) {
	if _, ok := records["bridge"]; ok {
		_, alive, err := j.host.Link(key.HostVeth())
		return alive, err
	}
	var targets []netip.Addr
	path := ""
	for _, rec := range records {
		path = rec.Netns
		if rec.Plugin != "portmap" {
			continue
		}
		var err error
		if targets, err = portmap.Targets(rec); err != nil {
			return false, err
		}
	}
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	pod, err := kernel.Open(file)
	if err != nil {
		return false, nil // the file is there, the namespace is not
	}
	defer pod.Close()
	link, ok, err := pod.Link(key.IfName)
	if err != nil || !ok {
		return false, err
	}
	has, err := pod.Addresses(link)
	return len(targets) == 0 || slices.ContainsFunc(has, func(p netip.Prefix) bool { return slices.Contains(targets, p.Addr()) }), err
}

// addressesOf returns what all interfaces of the container have in the network.
func addressesOf(key attachment.Key, all map[attachment.Key]map[string]attachment.Record) (addresses []netip.Prefix, err error) {
	for _, other := range attachment.Sorted(all) {
		rec, ok := all[other]["bridge"]
		if !ok || other.ContainerID != key.ContainerID {
			continue
		}
		of, err := bridge.FromRecord(rec)
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, of.Addresses...)
	}
	return addresses, nil
}

// bury removes what is left of a pod whose interface is gone. Its addresses go back with the runtime's DEL, by either plugin.
func (j *job) bury(key attachment.Key, records map[string]attachment.Record) attachment.Step {
	return attachment.Step{Text: "its interface is gone: remove its rules and devices", Do: func() error {
		ref := kernel.Reference{Network: key.Network, ContainerID: key.ContainerID, IfName: key.IfName, Hashes: []string{key.ReferenceHash()}}
		errs := []error{j.host.DelReferenceMasquerade(ref), j.host.DelReferencePorts(ref)}
		if rec, ok := records["portmap"]; ok {
			errs = append(errs, portmap.EndPorts(j.host, rec))
		}
		if rec, ok := records["bandwidth"]; ok {
			name, _, err := bandwidth.Device(rec)
			if err == nil && name != "" {
				err = j.host.DelLink(name)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}}
}

// node removes what all pods share, and the records last.
func (j *job) node() error {
	fmt.Fprintln(j.Out, "node")
	var steps []attachment.Step
	tables, err := j.host.OwnTables()
	if err != nil {
		return err
	}
	for _, table := range tables {
		steps = append(steps, attachment.Step{Text: "delete nftables table " + table.String(), Do: func() error { return j.host.DelTable(table) }})
	}
	for _, i := range sortedPairs(j.indexes) {
		if path, ok := hostlocal.IndexPath(i[0], i[1]); ok {
			steps = append(steps, attachment.Step{Text: "remove " + path, Do: func() error { return hostlocal.RemoveIndex(i[0], i[1]) }})
		}
	}
	if j.state {
		steps = append(steps, attachment.Step{Text: "remove the records in " + store.Root})
	}
	if j.Act {
		if err := j.nobodyNew(); err != nil {
			return err
		}
	}
	if err := j.do(steps); err != nil || !j.Act {
		return err
	}
	return attachment.Clear() // also the lock of this run
}

// nobodyNew makes sure that no plugin of Podlace has added a pod meanwhile.
func (j *job) nobodyNew() error {
	networks, err := attachment.Networks()
	if err != nil {
		return err
	}
	for _, network := range networks {
		all, _, err := attachment.Attachments(network)
		if err != nil {
			return err
		}
		for _, key := range attachment.Sorted(all) {
			if !j.seen[key] {
				return fmt.Errorf("container %s was added by Podlace meanwhile: put the files of the reference in place, then run it again", key.ContainerID)
			}
		}
	}
	return nil
}

func sortedPairs(of map[[2]string]bool) (pairs [][2]string) {
	for p := range of {
		pairs = append(pairs, p)
	}
	slices.SortFunc(pairs, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	return pairs
}
