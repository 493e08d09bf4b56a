// SPDX-License-Identifier: Apache-2.0

// Package hostlocal assigns addresses to pods from configured ranges. For each assigned address, a folder on the node contains a lease
// file. The lease files have the format of the reference host-local plugin. Therefore, a node can change from the reference plugin to this
// plugin and back.
package hostlocal

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/plugin"
)

// Plugin returns the host-local plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "host-local", NoNetns: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

func add(r *plugin.Request) (*types100.Result, error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	l, err := openLeases(cfg.Dir, r.Log)
	if err != nil {
		return nil, err
	}
	defer l.close()
	if err := clearOwn(r, l); err != nil {
		return nil, err
	}
	a := allocation{r: r, l: l, mine: entry{Attachment: r.Attachment(), Boot: l.index.boot, Netns: r.NetnsPath, Pod: r.Pod.String()}}
	ips, err := a.allocateAll(cfg)
	if err != nil {
		return nil, err
	}
	return &types100.Result{IPs: ips, Routes: cfg.Routes, DNS: cfg.DNS}, nil
}

// clearOwn checks for old leases of the attachment before ADD. clearOwn returns an error if the attachment already has addresses in the
// current boot. clearOwn ends the attachment's leases of earlier boots: a reboot ends all pods, so these addresses are free.
func clearOwn(r *plugin.Request, l *leases) error {
	entries, err := l.entries(r.Attachment())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Boot != l.index.boot {
			if err := l.endEntry(e); err != nil {
				return err
			}
			continue
		}
		for _, addr := range e.Addresses {
			if ok, err := l.ownsLease(addr, r.Attachment()); ok || err != nil {
				return plugin.WithHint(errors.Join(err, plugin.Errorf(plugin.CodeAddressTaken,
					"%s has been allocated to %s, duplicate allocation is not allowed", addr, r.ContainerID)), "call DEL first")
			}
		}
	}
	return nil
}

func del(r *plugin.Request) error {
	return release(r, func(l *leases) ([]entry, error) {
		entries, err := l.entries(r.Attachment())
		if !r.NotAfter.IsZero() {
			entries = slices.DeleteFunc(entries, func(e entry) bool { return e.after(r.NotAfter) })
		}
		return entries, err
	})
}

func gc(r *plugin.Request) error {
	return release(r, func(l *leases) ([]entry, error) {
		entries, err := l.allEntries()
		return slices.DeleteFunc(entries, func(e entry) bool {
			return isValid(r, e.Attachment) || !r.Stale(e.Attachment, e.Netns, l.written(e))
		}), err
	})
}

// isValid reports whether GC's list of valid attachments contains the owner of a lease. A lease in the old format contains no interface
// name. The owner of such a lease is valid if any attachment of its container is valid.
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

// release() ends the leases of selected entries. The argument "which" is the function that selects the entries. If the network never had a
// lease, release() does nothing.
func release(r *plugin.Request, which func(*leases) ([]entry, error)) error {
	path := parseDir(r)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	l, err := openLeases(path, r.Log)
	if err != nil {
		return err
	}
	defer l.close()
	entries, err := which(l)
	if err != nil || len(entries) == 0 {
		return err
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, l.endEntry(e))
	}
	l.markIndexCurrent()
	return errors.Join(errs...)
}
