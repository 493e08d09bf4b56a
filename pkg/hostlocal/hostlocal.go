// SPDX-License-Identifier: Apache-2.0

// Package hostlocal assigns addresses to pods from configured ranges. Each address has a lease file in a folder on the node, in the format
// of the reference plugin host-local, so a node can change from one to the other and back.
package hostlocal

import (
	"encoding/json"
	"errors"
	"net/netip"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Plugin returns the host-local plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "host-local", NoNetns: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

// state is the part of a record that host-local reads, and all that its own record has. Podlace's main plugins record the addresses too, so
// host-local writes a record only for other main plugins.
type state struct {
	Addresses []netip.Prefix  `json:"addresses"`
	IPAM      json.RawMessage `json:"ipam,omitempty"`
	Chained   bool            `json:"chained,omitempty"` // the leases of sriov are in the folder of the network with ipam.ChainedSuffix
}

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	var att *attachment.Attachment // nil if a main plugin in this process has locked the attachment
	if r.LockFile == nil {
		if att, err = attachment.Open(r); err != nil {
			return nil, err
		}
	}
	defer att.Close()
	l, err := openLeases(makeFolder, cfg.Dir, r.Network, r.Log, attachment.Waiting)
	if err != nil {
		return nil, err
	}
	defer l.close()
	if err := l.markBoot(); err != nil {
		return nil, err
	}
	if att != nil {
		if err := refuseSecond(r, att, l); err != nil {
			return nil, err
		}
	}
	a := allocation{r: r, l: l}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(a.giveBack)
	ips, err := a.allocateAll(cfg)
	if err != nil {
		return nil, err
	}
	if att != nil {
		if err := att.Save(state{IPAM: ipam.Object(r.Config), Addresses: a.given}); err != nil {
			return nil, err
		}
	}
	return &types100.Result{IPs: ips, Routes: cfg.Routes, DNS: cfg.DNS}, nil
}

// refuseSecond fails if the record names an address that is or may still be leased to the attachment, or cannot be read, for example
// because a newer version wrote it.
func refuseSecond(r *plugin.Request, att *attachment.Attachment, l *leases) error {
	var st state
	ok, err := att.Load(&st)
	if err != nil {
		return err
	}
	if !ok && attachment.Recorded(r) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "container %s has an unreadable record", r.ContainerID), "call DEL first")
	}
	for _, p := range st.Addresses {
		if is, ok := l.read(p.Addr()); ok && (is.unread != nil || owns(is.of, r.Attachment())) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken,
				"%s has been allocated to %s, duplicate allocation is not allowed", p.Addr(), r.ContainerID), "call DEL first")
		}
	}
	return nil
}

// del releases the addresses in the record, or without them those in prevResult. If none of them is leased to the attachment, it reads all
// leases: the record may be lost, and the runtime may have no result. If a record names a folder, only that one can make DEL fail.
func del(r *plugin.Request) (err error) {
	var att *attachment.Attachment // as in ADD
	known, paths := r.Leased, []string{parseDir(r)}
	if r.LockFile == nil {
		var st state
		if att, st, _, err = attachment.Take[state](r); err != nil {
			return err
		}
		if known = st.Addresses; st.IPAM != nil { // dataDir may have changed since ADD
			paths = append(paths, LeaseDir(r.Network, dataDirOf(st.IPAM)))
		}
	}
	defer att.Close()
	if r.Prev != nil && len(known) == 0 {
		for _, ip := range r.Prev.IPs {
			p, _ := kernel.Prefix(&ip.Address)
			known = append(known, p)
		}
	}
	for i, path := range slices.Compact(paths) {
		if err != nil {
			r.Log.Warn("cannot release leases in the folder of dataDir; ADD used another one", "folder", paths[i-1], "error", err)
		}
		l, e := openLeases(store.Open, path, r.Network, r.Log, attachment.Waiting)
		if e == nil {
			e = l.releaseAll(r, known)
			l.close()
		}
		err = ignoreMissing(e)
	}
	if err != nil {
		return err
	}
	return att.Remove()
}

func (l *leases) releaseAll(r *plugin.Request, known []netip.Prefix) error {
	released, errs := 0, []error(nil)
	for _, p := range known {
		ok, err := l.release(p.Addr(), r.Attachment(), r.NotAfter)
		if errs = append(errs, err); ok {
			released++
		}
	}
	if err := errors.Join(errs...); err != nil || released > 0 {
		return err
	}
	all, err := l.all()
	if err != nil {
		return err
	}
	for _, is := range all {
		if owns(is.of, r.Attachment()) {
			_, err := l.release(is.addr, r.Attachment(), r.NotAfter)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// gcSlice is the number of leases that GC examines before other verbs get the lock.
const gcSlice = 256

// gc releases the leases of attachments that are no longer valid, and then the records of host-local.
func gc(r *plugin.Request) error {
	attachment.ReportRestore(r, attachment.Trying, restoreAll(r.Log, attachment.Trying, func(rec attachment.Record) bool {
		return rec.Network == r.Network && r.Valid[rec.Attachment()]
	})) // before GC adds to Valid
	dir := parseDir(r)
	var names []netip.Addr
	l, err := openLeases(store.Open, dir, r.Network, r.Log, attachment.Waiting)
	if err == nil {
		names, err = l.names()
		l.close()
	}
	errs := []error{ignoreMissing(err)}
	stale := map[plugin.Attachment]bool{} // asked once for each attachment, since Stale logs
	for part := range slices.Chunk(names, gcSlice) {
		errs = append(errs, collectPart(r, dir, part, stale))
	}
	gc := attachment.NewGC[state](r)
	for att := range gc.Stale() {
		gc.Report(att, att.Remove())
	}
	for hash := range gc.Unreadable() {
		gc.ReportUnreadable(hash, nil)
	}
	return errors.Join(append(errs, gc.Err())...)
}

func collectPart(r *plugin.Request, dir string, addresses []netip.Addr, stale map[plugin.Attachment]bool) error {
	l, err := openLeases(store.Open, dir, r.Network, r.Log, attachment.Waiting)
	if err != nil {
		return err
	}
	defer l.close()
	var errs []error
	for _, addr := range addresses {
		is, ok := l.read(addr)
		if !ok || is.torn() || isValid(r, is.of) {
			continue
		}
		if _, asked := stale[is.of]; !asked {
			stale[is.of] = r.Stale(is.of, l.netnsOf(is.of), is.written)
		}
		if stale[is.of] {
			_, err := l.release(addr, is.of, r.NotAfter)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// isValid reports whether the owner of a lease is in GC's list of valid attachments. A lease in the old format has no interface name, so
// any attachment of its container counts.
func isValid(r *plugin.Request, of plugin.Attachment) bool {
	if of.IfName != "" {
		return r.Valid[of]
	}
	for a := range r.Valid {
		if a.ContainerID == of.ContainerID {
			return true
		}
	}
	return false
}
