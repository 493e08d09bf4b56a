// SPDX-License-Identifier: Apache-2.0

// Package podlacepod is the plugin podlace-pod, which runs bridge, host-local, portmap and bandwidth in one process. Each part reads the
// configuration that it would have as a separate plugin and makes the same records, leases, rules and names. So either form can check,
// restore and delete what the other made.
package podlacepod

import (
	"fmt"
	"log/slog"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
)

// The type chain is a list of plugins, in the order of ADD. plugin.Split returns their configurations in the same order.
type chain []plugin.Plugin

// Plugin returns the plugin podlace-pod.
func Plugin() plugin.Plugin {
	limits := bandwidth.Plugin()
	c := chain{bridge.Plugin(hostlocal.Plugin()), portmap.Plugin(), limits}
	return plugin.Plugin{Name: plugin.PodType, MinVersion: limits.MinVersion, Add: c.add, Del: c.del, Check: c.check, GC: c.gc,
		Status: c.status}
}

func (c chain) check(r *plugin.Request) error {
	return c.each(r, func(p plugin.Plugin) verb { return p.Check })
}

func (c chain) gc(r *plugin.Request) error {
	return c.each(r, func(p plugin.Plugin) verb { return p.GC })
}

func (c chain) status(r *plugin.Request) error {
	return c.each(r, func(p plugin.Plugin) verb { return p.Status })
}

type verb = func(*plugin.Request) error

// requests returns the request of each part.
func requests(r *plugin.Request) (list []*plugin.Request, err error) {
	parts, err := plugin.Split(r.Config)
	for _, p := range parts {
		list = append(list, r.OfPart(p))
	}
	if r.Verb == "DEL" || r.Verb == "GC" {
		err = nil
	}
	return list, err
}

// parsers read the configurations of the later parts, so that a wrong one is refused before the first part changes anything.
func parsers() map[string]func(*plugin.Request) error {
	return map[string]func(*plugin.Request) error{
		"portmap":   func(r *plugin.Request) error { _, err := portmap.Parse(r); return err },
		"bandwidth": func(r *plugin.Request) error { _, err := bandwidth.Parse(r); return err },
	}
}

// add calls ADD of each part with the result of the part before. If a part after the first fails, add calls DEL, as a runtime does.
func (c chain) add(r *plugin.Request) (result *types100.Result, err error) {
	parts, err := requests(r)
	if err != nil {
		return nil, err
	}
	parse := parsers()
	for i, p := range c {
		if parse := parse[p.Name]; parse != nil {
			silent := *parts[i]
			silent.Log = slog.New(slog.DiscardHandler) // p.Add parses again and logs the warnings
			if err := parse(&silent); err != nil {
				return nil, failed(r, p, err)
			}
		}
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	result = r.Prev
	for i, p := range c {
		parts[i].Prev = result
		changed, err := p.Add(parts[i])
		if err != nil {
			return nil, failed(r, p, err)
		}
		if i == 0 {
			undo.Push(func() error { return c.end(r, parts) })
		}
		if changed != nil {
			result = changed
		}
	}
	return result, nil
}

func (c chain) del(r *plugin.Request) error {
	parts, _ := requests(r)
	return c.end(r, parts)
}

// end calls DEL of each part in reverse order. The first part comes last and only if the others succeed, because it releases the addresses:
// a rule that is left would lead to their next owner.
func (c chain) end(r *plugin.Request, parts []*plugin.Request) error {
	var all error
	for i, p := range slices.Backward(c) {
		if i > 0 || all == nil {
			all = join(all, r, p, p.Del(parts[i]))
		}
	}
	return all
}

// each calls a verb of each part and returns all errors. GC has the order of DEL, so bridge keeps an attachment of whose record another
// part could not remove everything.
func (c chain) each(r *plugin.Request, of func(plugin.Plugin) verb) error {
	parts, err := requests(r)
	if err != nil {
		return err
	}
	order := slices.All(c)
	if r.Verb == "GC" {
		order = slices.Backward(c)
	}
	var all error
	for i, p := range order {
		all = join(all, r, p, of(p)(parts[i]))
	}
	return all
}

// join adds the error of a part, with its hint, to those of the parts before it. The code is that of the first.
func join(all error, r *plugin.Request, p plugin.Plugin, err error) error {
	switch {
	case err == nil:
		return all
	case all == nil:
		return failed(r, p, err)
	}
	hint := plugin.Hint(err)
	err = fmt.Errorf("%w; %w", all, failed(r, p, err))
	if hint != "" {
		return plugin.WithHint(err, "%s", hint)
	}
	return err
}

// failed adds the name of a part to its error, and to that of the plugin in the error document.
func failed(r *plugin.Request, p plugin.Plugin, err error) error {
	if r.Plugin == plugin.PodType {
		r.Plugin += " (" + p.Name + ")"
		return err
	}
	return fmt.Errorf("%s: %w", p.Name, err)
}
