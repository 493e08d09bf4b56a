// SPDX-License-Identifier: Apache-2.0

// Package rollback converts the network of a node's running pods from Podlace to the reference plugins, whose DEL can then remove all of
// it, and removes Podlace's remaining state. The pods' network works meanwhile, because new rules are added before old ones are removed,
// and connections keep their address translation.
//
// Each step is idempotent and the records are removed last, so if a run fails or is killed, the next completes it.
package rollback

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

// Options are those of one call of Run.
type Options struct {
	ConfDir  string              // the runtime's configuration folder
	BinDir   string              // the runtime's folder of plugins
	Networks []reconcile.Network // networks in that folder
	Damaged  []string            // unreadable files in that folder
	Act      bool                // false for a dry run
	Out      io.Writer
}

// ErrRemains means that some of Podlace's state could not be converted or removed.
var ErrRemains = errors.New("state of Podlace remains")

type job struct {
	Options
	host    *kernel.Node
	seen    map[attachment.Key]bool
	indexes map[[2]string]bool // keys: network and data folder
	failed  map[[2]string]bool // keys: network and hash of an attachment, of which several records may be unreadable
	state   bool               // the state folder exists
}

// Run prints all steps and, with Act, executes them. Any error except ErrRemains means that it could not start and changed nothing.
func Run(o Options) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	_, missing := os.Stat(store.Root)
	j := &job{Options: o, host: host, seen: map[attachment.Key]bool{}, indexes: map[[2]string]bool{},
		failed: map[[2]string]bool{}, state: missing == nil}
	records, err := readAll()
	if err != nil {
		return err
	}
	if err := j.checkReadable(records); err != nil {
		return err
	}
	if err := j.checkPlugins(records); err != nil {
		return err
	}
	for _, u := range reconcile.Users(j.Networks, plugin.PodType) {
		if u.Cached {
			j.printLine("NOTE: %s names %s: keep it installed until this pod is gone", u.File, u.Plugin)
		} else {
			j.printLine("NOTE: the reference has no %s: put bridge, portmap and bandwidth in its place in %s", u.Plugin, u.File)
		}
	}
	for _, r := range records {
		j.network(r)
	}
	if len(j.failed) > 0 {
		return fmt.Errorf("%w: attachments that cannot be rewritten: %d; mend that and run it again", ErrRemains, len(j.failed))
	}
	if err := j.cleanNode(); err != nil {
		return fmt.Errorf("%w: %w", ErrRemains, err)
	}
	return nil
}

type networkRecords struct {
	network    string
	found      map[attachment.Key]map[string]attachment.Record
	unreadable []attachment.Damaged
}

func readAll() (all []networkRecords, err error) {
	networks, err := attachment.Networks()
	if err != nil {
		return nil, err
	}
	for _, network := range networks {
		r := networkRecords{network: network}
		if r.found, r.unreadable, err = attachment.Attachments(network); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// checkReadable returns an error if a network has attachments but no configuration while a configuration file cannot be read.
func (j *job) checkReadable(all []networkRecords) error {
	for _, r := range all {
		if _, ok := reconcile.Named(j.Networks, r.network); !ok && len(r.found)+len(r.unreadable) > 0 && len(j.Damaged) > 0 {
			return fmt.Errorf("network %s has no configuration in %s that can be read: %s", r.network, j.ConfDir, strings.Join(j.Damaged, "; "))
		}
	}
	return nil
}

func (r networkRecords) hasPods() bool {
	for _, records := range r.found {
		for _, rec := range records {
			if !plugin.NetnsGone(rec.Netns) {
				return true
			}
		}
	}
	return false
}

// checkPlugins reports plugins of Podlace that the runtime would start for new pods while the running ones are rewritten. With Act it is an
// error. On a node without pods the plugins may stay, because `make uninstall` comes next.
func (j *job) checkPlugins(all []networkRecords) error {
	if !slices.ContainsFunc(all, networkRecords.hasPods) {
		return nil
	}
	var files []string
	for _, net := range j.Networks {
		for _, p := range net.Plugins {
			for _, name := range []string{p.Type, p.IPAM} {
				file := filepath.Join(j.BinDir, name)
				if _, err := reconcile.Version(file); name != "" && err == nil && !slices.Contains(files, file) {
					files = append(files, file)
				}
			}
		}
	}
	if len(files) == 0 {
		return nil
	}
	err := fmt.Errorf("new pods would still be Podlace's, because %s are: first put the reference's plugins in their place and take podlace-pod "+
		"out of the conflist; find %s -name '*.before-podlace*' lists the kept ones", strings.Join(files, ", "), j.BinDir)
	if j.Act {
		return err
	}
	j.printLine("NOTE: %s", err.Error())
	return nil
}

// remedyHint is the hint for an unreadable record. DEL works without it by computing the names of the attachment's objects.
const remedyHint = "have the runtime delete its pod, which removes the record too; when no pod is left that it could be of, remove the file"

// ownValues matches values that the reference plugins refuse.
var ownValues = regexp.MustCompile(`(?i)"ipMasq"\s*:\s*\{[^}]*\}|"mtu"\s*:\s*"auto"|"subnet"\s*:\s*"usePodCidr(IPv6)?"`)

func (j *job) network(r networkRecords) {
	for _, d := range r.unreadable {
		j.printLine("network %s: record %s cannot be read by this version (%s), and its pod is not rewritten: "+remedyHint, r.network, d.Path(), d.Reason.Error())
		j.failed[[2]string{d.Network, strings.TrimPrefix(d.Name, d.Plugin()+"-")}] = true
	}
	conf, _ := reconcile.Named(j.Networks, r.network) // without a configuration, each step that needs it fails
	j.indexes[[2]string{r.network, conf.DataDir()}] = true
	for _, p := range conf.Plugins {
		if kind := plugin.Kind(p.Type); kind != p.Type {
			j.printLine("network %s: NOTE: the reference is not installed as %s: put %s in its place in %s", r.network, p.Type, kind, conf.File)
		}
	}
	for _, value := range ownValues.FindAllString(string(conf.Text), -1) {
		j.printLine("network %s: NOTE: the reference refuses %s: replace it in %s", r.network, strings.Join(strings.Fields(value), " "), conf.File)
	}
	keys := attachment.Sorted(r.found)
	of := map[string][]attachment.Key{}
	for _, key := range keys {
		of[key.ContainerID] = append(of[key.ContainerID], key)
	}
	for _, key := range keys {
		j.seen[key] = true
		j.rewrite(key, of[key.ContainerID], conf)
	}
}

// printLine prints a line. It replaces special characters in parts, because a pod's name is not trusted.
func (j *job) printLine(format string, parts ...string) {
	plain := make([]any, len(parts))
	for i, p := range parts {
		plain[i] = plugin.Plain(p, reconcile.MaxMessage)
	}
	fmt.Fprintf(j.Out, format+"\n", plain...)
}

// rewrite prints the steps for an attachment and runs them under its lock. siblings are all attachments of the container in the network.
func (j *job) rewrite(key attachment.Key, siblings []attachment.Key, conf reconcile.Network) {
	err := func() error {
		if j.Act {
			lock, err := attachment.Waiting.Key(key)
			if err != nil {
				return err
			}
			defer lock.Close()
		}
		records, err := attachment.RecordsOf(key, attachment.Plugins()...)
		if err == nil && len(records) == 0 {
			return nil // a DEL removed it meanwhile
		}
		j.printLine("%scontainer %s, %s in network %s", podOf(records),
			plugin.Plain(key.ContainerID, reconcile.MaxName), plugin.Plain(key.IfName, reconcile.MaxName), key.Network)
		if err != nil {
			return fmt.Errorf("%w: "+remedyHint, err)
		}
		steps, err := j.steps(key, siblings, records, conf)
		if err != nil {
			return err
		}
		return j.do(steps)
	}()
	if err != nil {
		j.failed[[2]string{key.Network, key.Hash()}] = true
		j.printLine("  FAILED: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
}

// podOf returns the pod's name as the beginning of a line, or "" if the runtime passed none.
func podOf(records map[string]attachment.Record) string {
	for _, rec := range records {
		if rec.Pod != "" {
			return "pod " + plugin.Plain(rec.Pod, reconcile.MaxName) + ": "
		}
	}
	return ""
}

func (j *job) do(steps []attachment.Step) error {
	if len(steps) == 0 {
		fmt.Fprintln(j.Out, "  nothing to rewrite")
	}
	for _, s := range steps {
		j.printLine("  %s", s.Text)
		if !j.Act || s.Do == nil {
			continue
		}
		if err := s.Do(); err != nil {
			return err
		}
	}
	return nil
}

// cleanNode removes the state that all pods share, the records last.
func (j *job) cleanNode() error {
	vfs, err := attachment.Journaled()
	if err == nil && len(vfs) > 0 {
		err = fmt.Errorf("VFs %s are not as they were before pods got them: have the runtime delete those pods, or run podlace sriov reset",
			strings.Join(vfs, ", "))
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(j.Out, "node")
	var steps []attachment.Step
	open, err := portmap.LoopbackOpen(j.host)
	if err != nil {
		return err
	}
	if open { // the loopback is closed before its protection is removed
		steps = append(steps, attachment.Step{Text: "switch route_localnet off where no hostPort of the reference needs it",
			Do: func() error { return portmap.CloseLoopback(j.host) }})
	}
	tables, err := nft.Own()
	if err != nil {
		return err
	}
	for _, table := range tables {
		steps = append(steps, attachment.Step{Text: "delete nftables table " + table.String(), Do: func() error { return nft.DelTable(table) }})
	}
	for _, i := range slices.SortedFunc(maps.Keys(j.indexes), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		if path, ok := hostlocal.BootFile(i[0], i[1]); ok {
			steps = append(steps, attachment.Step{Text: "remove " + path, Do: func() error { return hostlocal.RemoveBootFile(i[0], i[1]) }})
		}
	}
	if j.state {
		steps = append(steps, attachment.Step{Text: "remove the records in " + store.Root})
	}
	if j.Act {
		if err := j.checkNoNewPods(); err != nil {
			return err
		}
	}
	if err := j.do(steps); err != nil || !j.Act {
		return err
	}
	return attachment.Clear()
}

// checkNoNewPods returns an error if Podlace has added a pod since the rollback started.
func (j *job) checkNoNewPods() error {
	all, err := readAll()
	if err != nil {
		return err
	}
	for _, r := range all {
		for _, key := range attachment.Sorted(r.found) {
			if !j.seen[key] {
				return fmt.Errorf("container %s was added by Podlace meanwhile: put the files of the reference in place, then run it again",
					key.ContainerID)
			}
		}
	}
	return nil
}
