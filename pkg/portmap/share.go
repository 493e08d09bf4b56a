// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// sharedPorts is the node's mark that tells DEL whether attachments share hostPorts: with none it reads no record of other pods. Without the mark,
// as after an earlier version, it looks.
const (
	sharedPorts = "shared-hostports"
	someShared  = "some"
	noneShared  = "none"
)

// claim is an ADD that asks for ports.
type claim struct {
	r       *plugin.Request
	cfg     Config
	host    *kernel.Node
	gave    []recorded // attachments that gave way
	decided map[string]decision
}

// decision is what yields answers about an owner.
type decision struct {
	loses []owned
	err   error
}

// add forwards the ports. A range of which another attachment has a part is taken apart: single ports can be passed on one by one.
func (c *claim) add(att *attachment.Attachment, st *state, own owned) error {
	err := addHostPorts(c.host, own, c.yields)
	if !errors.Is(err, errShared) {
		return err
	}
	singles := ports.Singles(st.Ports)
	if err := c.cfg.checkCount(singles); err != nil {
		return err
	}
	st.Ports, own.Ports = singles, singles
	if err := att.Save(*st); err != nil {
		return err
	}
	return addHostPorts(c.host, own, c.yields)
}

// yields decides about another attachment that has a port: it gives way when its pod is gone, and to a newer pod of the same name.
func (c *claim) yields(other string, p ports.Port) (loses []owned, err error) {
	hash := ownerHash(other)
	d, ok := c.decided[hash]
	if !ok {
		d.loses, d.err = c.ask(hash, other, p)
		if c.decided == nil {
			c.decided = map[string]decision{}
		}
		c.decided[hash] = d
	}
	return d.loses, d.err
}

func (c *claim) ask(hash, other string, p ports.Port) (loses []owned, err error) {
	rec, found, err := attachment.ByHash("portmap", hash)
	if err != nil {
		return nil, err
	}
	in := "hostPort %s is in use by %s"
	if !found {
		if o, ok, err := findOwner(c.host, hash); err != nil || ok && plugin.NetnsGone(o.Netns) {
			return nil, err
		}
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, in, p, ownerName(other)),
			"its record is lost; DEL of its container ends it")
	}
	if rec.ContainerID == c.r.ContainerID { // in another network, or by another interface
		if err := attachment.NoteNode(sharedPorts, someShared); err != nil {
			return nil, err
		}
		return nil, errShared
	}
	same, gone := rec.Pod != "" && rec.Pod == c.r.Pod.String(), plugin.NetnsGone(rec.Netns)
	if !same && !gone {
		return nil, plugin.Errorf(plugin.CodePortConflict, in, p, who(rec, other))
	}
	c.r.Log.Warn("a hostPort is taken over", "port", p.String(), "from", ownerName(other), "container", rec.ContainerID, "samePod", same)
	if !gone {
		if err := attachment.NoteNode(sharedPorts, someShared); err != nil {
			return nil, err
		}
	}
	return c.replace(rec.ContainerID, gone)
}

// replace notes that a container gives way, in all its networks: those that share the port have rules too. A container that is gone loses all.
func (c *claim) replace(container string, gone bool) (loses []owned, err error) {
	records, err := attachment.AllOf("portmap")
	for _, rec := range records {
		of := recorded{Record: rec}
		if rec.ContainerID != container || json.Unmarshal(rec.State, &of.state) != nil {
			continue
		}
		if !slices.ContainsFunc(c.gave, func(o recorded) bool { return o.Key == rec.Key }) {
			c.gave = append(c.gave, of)
		}
		if gone {
			loses = append(loses, of.hostPorts(of.owner()))
		}
	}
	return loses, err
}

// clear removes the iptables rules of the attachments that gave way, which come before all others.
func (c *claim) clear() error {
	var errs []error
	for _, rec := range c.gave {
		if rec.Backend == "iptables" {
			errs = append(errs, iptables.RemoveChain(dnatChain, podChain(rec.Key)))
		}
	}
	return errors.Join(errs...)
}

// others names the owner of a port, and reports whether the port is shared: with another attachment of the same container.
func others(r *plugin.Request) func(owner string) (name string, shares bool) {
	type answer struct {
		name   string
		shares bool
	}
	known := map[string]answer{}
	return func(owner string) (string, bool) {
		a, ok := known[owner]
		if ok {
			return a.name, a.shares
		}
		a.name = ownerName(owner)
		if rec, found, err := attachment.ByHash("portmap", ownerHash(owner)); err == nil && found {
			a = answer{who(rec, owner), rec.ContainerID == r.ContainerID}
		}
		known[owner] = a
		return a.name, a.shares
	}
}

// who names an owner with what distinguishes it from an earlier pod of the same name.
func who(rec attachment.Record, owner string) string {
	return fmt.Sprintf("%s, container %s, since %s", ownerName(owner), rec.ContainerID, rec.Written.UTC().Format(time.RFC3339))
}

// passPorts gives ports of an attachment that ends to the attachments that asked for them too: those of the same container in other networks, and
// an older pod of the same name that still runs. The caller holds the lock of the ports.
func passPorts(host *kernel.Node, hash string, ends func(ports.Port) bool) error {
	if noted, _ := attachment.NodeNoted(sharedPorts); noted == noneShared {
		return nil
	}
	// An attachment of the same container keeps its port when its namespace is gone: so the next pod that asks for the port removes its rules too.
	ending, _, _ := attachment.ByHash("portmap", hash) // recordedBut reports the same error
	all, err := recordedBut(hash, ending.ContainerID)
	if err != nil {
		slog.Warn("some records cannot be read; hostPorts that their attachments share with this one end with it", "error", err)
	}
	var heirs []recorded
	var wanted []owned
	for _, rec := range all {
		h := rec.wanted()
		h.Ports = slices.DeleteFunc(slices.Clone(h.Ports), func(p ports.Port) bool { return !ends(p) })
		if len(h.Ports) > 0 {
			heirs, wanted = append(heirs, rec), append(wanted, h)
		}
	}
	if len(heirs) == 0 {
		if shared, err := sharedBut(hash); err != nil || shared {
			return nil
		}
		return attachment.NoteNode(sharedPorts, noneShared)
	}
	if err := passHostPorts(host, hash, wanted); err != nil {
		return err
	}
	if _, err := restoreIPTables(heirs, true, slog.Default()); err != nil {
		slog.Warn(notRestored, "error", err)
	}
	return nil
}

// sharedBut reports whether two attachments ask for one port, other than the attachment whose key has the hash. One that has not got its ports yet
// counts.
func sharedBut(hash string) (bool, error) {
	records, err := attachment.AllOf("portmap")
	var seen ports.Index
	for _, rec := range records {
		var st state
		if rec.Hash() == hash || json.Unmarshal(rec.State, &st) != nil || st.Ended {
			continue
		}
		if slices.ContainsFunc(st.Ports, func(p ports.Port) bool { return seen.Overlap(p, rec.Hash()) }) {
			return true, err
		}
		seen.Add(rec.Hash(), st.Ports...)
	}
	return false, err
}
