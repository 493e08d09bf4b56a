// SPDX-License-Identifier: Apache-2.0

// Package reconcile finds attachments on this node whose pods are gone, and calls the plugins to remove them.
//
// An attachment is dead only if there is proof: the network namespace of its ADD does not exist, or the node has rebooted since. One whose
// namespace exists or whose container runs is never removed.
//
// The namespace is unknown if another program wrote the lease, or if the recorded path is not a namespace's. Such an attachment is dead
// only if a runtime answered and does not know the container, the attachment is older than maxADDAge, and, without a recorded path,
// libcni's cache lacks the container.
package reconcile

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// maxADDAge is longer than any ADD. A younger attachment with an unknown namespace may still be in its ADD, during which the runtime does
// not list the pod.
const maxADDAge = 10 * time.Minute

// States of a namespace.
const (
	Alive   = "alive"
	Gone    = "gone"
	Unknown = "unknown"
)

// Attachment holds all recorded data about one attachment.
type Attachment struct {
	Network     string       `json:"network"`
	Pod         string       `json:"pod,omitempty"`
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifname,omitempty"` // "" for a lease in the old format
	Addresses   []netip.Addr `json:"addresses,omitempty"`
	Netns       string       `json:"netns,omitempty"`
	State       string       `json:"state"`          // state of the namespace
	Holders     []string     `json:"plugins"`        // plugins with state of it
	Dead        string       `json:"dead,omitempty"` // why it is dead; "" if it stays
	Removed     *bool        `json:"removed,omitempty"`

	Since         time.Time    `json:"since,omitzero"` // when the oldest record was written
	Bridge        string       `json:"bridge,omitempty"`
	HostInterface string       `json:"hostInterface,omitempty"`
	Fault         string       `json:"fault,omitempty"` // why the interface does not work; only 'podlace topology' sets it
	MACs          []string     `json:"macs,omitempty"`  // of the pod's interfaces, as far as records name them
	HostPorts     []ports.Port `json:"hostPorts,omitempty"`
	IngressRate   uint64       `json:"ingressRate,omitempty"` // limit in bits per second
	EgressRate    uint64       `json:"egressRate,omitempty"`  // limit in bits per second
	VFs           []string     `json:"vfs,omitempty"`         // PCI addresses

	Damaged []Damaged `json:"damaged,omitempty"`
	Cached  bool      `json:"-"` // in libcni's cache

	earlier bool // from an earlier boot
	written time.Time
}

// Key returns the key under which the attachment's records are stored.
func (a *Attachment) Key() attachment.Key {
	return attachment.Key{Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName}
}

// Damaged describes an unreadable record of an attachment.
type Damaged struct {
	Record string `json:"record"` // path of the record
	Reason string `json:"reason"`
}

// List returns the attachments recorded on this node: in the plugins' records, and in host-local's leases in the networks' folders and the
// default one.
func List(networks []Network) ([]*Attachment, error) {
	records, _, err := attachment.Scan()
	if err != nil {
		return nil, err
	}
	return ListOf(records, networks)
}

// ListOf is List with records that the caller has already read.
func ListOf(records []attachment.Record, networks []Network) ([]*Attachment, error) {
	found := map[attachment.Key]*Attachment{}
	for _, rec := range records {
		a := entry(found, rec.Key)
		a.Pod, a.Netns = rec.Pod, rec.Netns
		a.Holders = append(a.Holders, rec.Plugin)
		for _, p := range rec.Addresses()[rec.IfName] {
			a.Addresses = append(a.Addresses, p.Addr())
		}
		a.addDescription(rec)
	}
	for path := range leaseFolders(networks) {
		if err := addLeases(found, path); err != nil {
			return nil, err
		}
	}
	for _, c := range readCache() {
		if a := found[attachment.Key{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName}]; a != nil {
			a.Cached = true
			a.Netns, a.Pod = cmp.Or(a.Netns, c.Netns), cmp.Or(a.Pod, c.pod())
		}
	}
	var list []*Attachment
	for _, a := range found {
		slices.SortFunc(a.Addresses, netip.Addr.Compare)
		a.Addresses = slices.Compact(a.Addresses)
		slices.Sort(a.Holders)
		a.Holders = slices.Compact(a.Holders)
		a.State = stateOf(a.Netns, a.earlier)
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b *Attachment) int {
		return slices.Compare([]string{a.Network, a.Pod, a.ContainerID, a.IfName}, []string{b.Network, b.Pod, b.ContainerID, b.IfName})
	})
	return list, nil
}

func entry(found map[attachment.Key]*Attachment, k attachment.Key) *Attachment {
	if found[k] == nil {
		found[k] = &Attachment{Network: k.Network, ContainerID: k.ContainerID, IfName: k.IfName}
	}
	return found[k]
}

func stateOf(netns string, earlier bool) string {
	switch {
	case plugin.NetnsExists(netns):
		return Alive
	case earlier || plugin.NetnsGone(netns):
		return Gone
	}
	return Unknown
}

func leaseFolders(networks []Network) map[string]bool {
	folders := map[string]bool{}
	paths, _ := filepath.Glob(hostlocal.DefaultDir + "/*")
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && info.IsDir() && !strings.HasPrefix(filepath.Base(path), ".") {
			folders[path] = true
		}
	}
	for _, n := range networks {
		for _, p := range n.Plugins {
			if plugin.Kind(p.IPAM) == hostLocal && p.dataDir != "" {
				folders[filepath.Join(p.dataDir, n.Name)] = true
			}
		}
	}
	return folders
}

func addLeases(found map[attachment.Key]*Attachment, path string) error {
	leases, err := hostlocal.Leases(path)
	if err != nil {
		return err
	}
	for of, l := range leases {
		a := entry(found, attachment.Key{Network: filepath.Base(path), ContainerID: of.ContainerID, IfName: of.IfName})
		// Records are on tmpfs, so an attachment with one was made after the last boot.
		a.earlier = l.Earlier && len(a.Holders) == 0
		a.written = l.Written
		a.Holders = append(a.Holders, "host-local")
		a.Addresses = append(a.Addresses, l.Addresses...)
	}
	return nil
}

// Judge marks dead attachments. With all, those with an unknown namespace can be dead even if no runtime answered.
func Judge(list []*Attachment, rt Runtimes, all bool) {
	for _, a := range list {
		a.Pod = cmp.Or(a.Pod, rt.pods[a.ContainerID])
		if a.State == Alive || rt.Running[a.ContainerID] {
			continue
		}
		switch {
		case a.earlier:
			a.Dead = "made before the node was booted"
		case a.State == Gone:
			a.Dead = "namespace " + a.Netns + " is gone"
		case len(rt.Asked) == 0 && !all, time.Since(a.written).Abs() < maxADDAge:
		case a.Netns != "":
			a.Dead = a.Netns + " is no namespace any more"
		case !a.Cached:
			a.Dead = "no runtime knows the container"
		}
	}
}

// Dead returns the dead attachments in a list.
func Dead(list []*Attachment) (dead []*Attachment) {
	for _, a := range list {
		if a.Dead != "" {
			dead = append(dead, a)
		}
	}
	return dead
}

// Doubt returns why an administrator should look at the dead attachments before their state is removed, or nil.
func Doubt(list []*Attachment, rt Runtimes) error {
	dead := len(Dead(list))
	switch {
	case dead == 0:
	case len(rt.Asked) == 0:
		return errors.New("no runtime could be asked what it runs: there is no crictl that answers, and none of " +
			strings.Join(append(taskFolders(), storageFolder), ", "))
	case dead == len(list):
		return errors.New("nothing would be left: every attachment of this node looks dead")
	}
	return nil
}
