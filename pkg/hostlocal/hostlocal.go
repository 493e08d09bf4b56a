// SPDX-License-Identifier: Apache-2.0

// Package hostlocal hands out addresses from ranges in the configuration and keeps a file for each in a folder on the node, in the
// format of the reference host-local plugin, so that either can take over from the other.
package hostlocal

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
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
	a := allocation{r: r, l: l, mine: entry{Attachment: r.Attachment(), Boot: l.index.boot, Netns: r.NetnsPath}}
	ips, err := a.all(cfg)
	if err != nil {
		return nil, err
	}
	return &types100.Result{IPs: ips, Routes: cfg.Routes, DNS: cfg.DNS}, nil
}

// clearOwn refuses an attachment that has addresses already. Those of an earlier boot are no longer its own: the kernel forgot them.
func clearOwn(r *plugin.Request, l *leases) error {
	entries, err := l.entries(r.Attachment())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Boot != l.index.boot {
			if _, err := l.end(e); err != nil {
				return err
			}
			continue
		}
		for _, addr := range e.Addresses {
			if ok, err := l.holds(addr, r.Attachment()); ok || err != nil {
				return plugin.WithHint(errors.Join(err, plugin.Errorf(plugin.CodeAddressTaken,
					"%s has been allocated to %s, duplicate allocation is not allowed", addr, r.ContainerID)), "call DEL first")
			}
		}
	}
	return nil
}

func del(r *plugin.Request) error {
	return release(r, func(l *leases) ([]entry, error) { return l.entries(r.Attachment()) })
}

func gc(r *plugin.Request) error {
	return release(r, func(l *leases) ([]entry, error) {
		entries, err := l.index.all()
		return slices.DeleteFunc(entries, func(e entry) bool { return valid(r, e.Attachment) || !r.Stale(e.Attachment, e.Netns, l.written(e)) }), err
	})
}

// valid tells whether a lease is in the list of GC; one of the old format has no interface name and is kept while its container
// has any valid attachment.
func valid(r *plugin.Request, of plugin.Attachment) bool {
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

// release ends the entries that which returns. A network that never had a lease is left alone.
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
		_, err := l.end(e)
		errs = append(errs, err)
	}
	return errors.Join(append(errs, l.index.settle())...)
}

// check compares the leases with prevResult: each address of a range of ours must be leased to this attachment.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	dir, err := store.Open(cfg.Dir)
	if err != nil {
		return plugin.Errorf(plugin.CodeStateDiffers, "lease folder: %w", err)
	}
	defer dir.Close()
	for _, ip := range r.Prev.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if !ok || !cfg.serves(p.Addr()) {
			continue
		}
		data, err := dir.Read(p.Addr().String())
		if err != nil {
			return plugin.Errorf(plugin.CodeStateDiffers, "lease of %s: %w", p.Addr(), err)
		}
		if of := parseOwner(string(data)); !owns(of, r.Attachment()) {
			return plugin.Errorf(plugin.CodeStateDiffers, "the lease of %s belongs to container %q interface %q", p.Addr(), of.ContainerID, of.IfName)
		}
	}
	return nil
}

func (c Config) serves(addr netip.Addr) bool {
	for _, set := range c.Sets {
		if _, ok := set.find(addr); ok {
			return true
		}
	}
	return false
}

// status fails only when no ADD can work: an exhausted pool recovers by itself and must not take the node out of service.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	if err := writable(cfg.Dir); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "lease folder %s: %w", cfg.Dir, err)
	}
	return nil
}

// writable tells whether ADD could write to a folder, or make it, without doing so.
func writable(path string) error {
	for ; ; path = filepath.Dir(path) {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && path != filepath.Dir(path) {
			continue
		}
		info, err := os.Stat(path)
		if err == nil && !info.IsDir() {
			err = unix.ENOTDIR
		}
		return errors.Join(err, unix.Access(path, unix.W_OK|unix.X_OK))
	}
}
