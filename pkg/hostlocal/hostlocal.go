// SPDX-License-Identifier: Apache-2.0

// Package hostlocal hands out addresses from ranges in the configuration and keeps a file for each in a folder on the node, in the
// format of the reference host-local plugin, so that either can take over from the other.
package hostlocal

import (
	"errors"
	"io/fs"
	"net/netip"
	"strings"

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

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	l, err := openLeases(cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer l.close()
	taken, err := l.all()
	if err != nil {
		return nil, err
	}
	for addr, of := range taken {
		if owns(of, r.Attachment()) {
			return nil, plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "%s has been allocated to %s, duplicate allocation is not allowed",
				addr, r.ContainerID), "call DEL first")
		}
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	result = &types100.Result{Routes: cfg.Routes, DNS: cfg.DNS}
	requests := cfg.requests
	for i, set := range cfg.Sets {
		var ip *types100.IPConfig
		if ip, requests, err = allocate(r, l, i, set, requests, taken, &undo); err != nil {
			return nil, err
		}
		result.IPs = append(result.IPs, ip)
	}
	if len(requests) > 0 {
		return nil, plugin.Errorf(plugin.CodeConfig, "failed to allocate all requested IPs: %s", addresses(requests))
	}
	return result, nil
}

func addresses(requests []request) string {
	list := make([]string, len(requests))
	for i, q := range requests {
		list[i] = q.addr.String()
	}
	return strings.Join(list, ",")
}

// allocate takes one address of the set: the requested one, else the next free one after the last that was given. It returns the
// requests that are left for the other sets.
func allocate(r *plugin.Request, l *leases, i int, set RangeSet, requests []request, taken map[netip.Addr]plugin.Attachment,
	undo *plugin.Undo) (*types100.IPConfig, []request, error) {
	wanted, rest := pick(set, requests)
	var ip *types100.IPConfig
	try := func(addr netip.Addr, in Range) (bool, error) {
		if _, used := taken[addr]; used {
			return false, nil
		}
		ok, err := l.take(addr, r.Attachment())
		if !ok || err != nil {
			return false, err
		}
		undo.Push(func() error { return l.release(addr) })
		ip = &types100.IPConfig{Address: *kernel.IPNet(netip.PrefixFrom(addr, in.Subnet.Bits())), Gateway: in.Gateway.AsSlice()}
		return true, l.setLast(i, addr)
	}
	if wanted.IsValid() {
		err := takeWanted(set, wanted, try)
		return ip, rest, err
	}
	err := set.walk(l.last(i), try)
	if plugin.Code(err) == plugin.CodeExhausted {
		err = plugin.WithHint(err, "%d addresses are leased in %s, the set holds %s", len(taken), l.dir.Path(), set.size())
	}
	return ip, rest, err
}

func takeWanted(set RangeSet, addr netip.Addr, try func(netip.Addr, Range) (bool, error)) error {
	in, _ := set.find(addr)
	if addr == in.Gateway {
		return plugin.Errorf(plugin.CodeAddressTaken, "requested address %s is the gateway of %s", addr, in.Subnet)
	}
	if ok, err := try(addr, in); err != nil || ok {
		return err
	}
	return plugin.Errorf(plugin.CodeAddressTaken, "requested IP address %s is not available in range set %s", addr, set)
}

// pick returns the request that the set serves, and those that remain: a source of lower precedence that asks for an address of the
// same set is dropped.
func pick(set RangeSet, requests []request) (wanted netip.Addr, rest []request) {
	rank := -1
	for _, q := range requests {
		_, in := set.find(q.addr)
		switch {
		case in && rank == -1:
			wanted, rank = q.addr, q.rank
		case in && q.rank > rank:
		default:
			rest = append(rest, q)
		}
	}
	return wanted, rest
}

func del(r *plugin.Request) error {
	_, err := Release(r)
	return err
}

// Release gives back the addresses of the attachment and returns them.
func Release(r *plugin.Request) ([]netip.Addr, error) {
	return release(r, func(of plugin.Attachment) bool { return owns(of, r.Attachment()) })
}

func gc(r *plugin.Request) error {
	_, err := release(r, func(of plugin.Attachment) bool { return of.ContainerID != "" && !valid(r, of) })
	return err
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

func release(r *plugin.Request, which func(plugin.Attachment) bool) (released []netip.Addr, err error) {
	path := parseDir(r)
	if dir, err := store.Open(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	} else {
		dir.Close()
	}
	l, err := openLeases(path)
	if err != nil {
		return nil, err
	}
	defer l.close()
	all, err := l.all()
	if err != nil {
		return nil, err
	}
	var errs []error
	for addr, of := range all {
		if which(of) {
			released = append(released, addr)
			errs = append(errs, l.release(addr))
		}
	}
	return released, errors.Join(errs...)
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
	dir, err := store.Make(cfg.Dir, 0o755)
	if err == nil {
		dir.Close()
		err = unix.Access(cfg.Dir, unix.W_OK)
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "lease folder %s: %w", cfg.Dir, err)
	}
	return nil
}
