// SPDX-License-Identifier: Apache-2.0

// Package podlacepod is the plugin podlace-pod, which runs bridge, host-local, portmap and bandwidth in one process. Each part reads the
// configuration that it would have as a separate plugin and makes the same records, leases, rules and names, so either form can check,
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

// chain is a list of parts in the order of ADD, in which plugin.Split also returns their configurations.
type chain []part

type part struct {
	plugin.Plugin
	parse func(*plugin.Request) error // refuses a wrong configuration before the first part changes anything; nil for the first part
}

// call is a part with the request that it receives.
type call struct {
	part
	r *plugin.Request
}

// Plugin returns the plugin podlace-pod.
func Plugin() plugin.Plugin {
	limits := bandwidth.Plugin()
	c := chain{
		{Plugin: bridge.Plugin(hostlocal.Plugin())},
		{portmap.Plugin(), func(r *plugin.Request) error { _, err := portmap.Parse(r); return err }},
		{limits, func(r *plugin.Request) error { _, err := bandwidth.Parse(r); return err }},
	}
	return plugin.Plugin{Name: plugin.PodType, MinVersion: limits.MinVersion, Add: c.add, Del: c.del, Check: c.check, GC: c.gc,
		Status: c.status}
}

func (c chain) check(r *plugin.Request) error {
	return c.each(r, func(p call) error { return p.Check(p.r) })
}

func (c chain) status(r *plugin.Request) error {
	return c.each(r, func(p call) error { return p.Status(p.r) })
}

// each calls a verb of each part that the configuration uses and returns all errors.
func (c chain) each(r *plugin.Request, verb func(call) error) error {
	calls, err := c.used(r)
	if err != nil {
		return err
	}
	var all error
	for _, p := range calls {
		all = join(all, r, p.Plugin, verb(p))
	}
	return all
}

// used returns the parts that a chain with the same configuration would have.
func (c chain) used(r *plugin.Request) (calls []call, err error) {
	parts, err := plugin.Split(r.Config)
	for i, p := range parts {
		if !p.Unused {
			calls = append(calls, call{c[i], r.OfPart(p)})
		}
	}
	return calls, err
}

// add calls ADD of each part with the result of the part before. If a part after the first fails, add calls DEL, as a runtime does.
func (c chain) add(r *plugin.Request) (result *types100.Result, err error) {
	calls, err := c.used(r)
	if err != nil {
		return nil, err
	}
	for _, p := range calls[1:] {
		silent := *p.r
		silent.Log = slog.New(slog.DiscardHandler) // ADD parses again and logs the warnings
		if err := p.parse(&silent); err != nil {
			return nil, failed(r, p.Plugin, err)
		}
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	result = r.Prev
	for i, p := range calls {
		p.r.Prev = result
		changed, err := p.Add(p.r)
		if err != nil {
			return nil, failed(r, p.Plugin, err)
		}
		if i == 0 {
			undo.Push(func() error { return c.del(r) })
		}
		if changed != nil {
			result = changed
		}
	}
	return result, nil
}

// all returns all parts in the order of DEL: an earlier configuration may have used a part that the present one does not. A wrong
// configuration is no reason to keep anything.
func (c chain) all(r *plugin.Request) (calls []call) {
	parts, _ := plugin.Split(r.Config)
	for i, p := range slices.Backward(parts) {
		calls = append(calls, call{c[i], r.OfPart(p)})
	}
	return calls
}

// del calls DEL of the first part last and only if the others succeed, because it releases the addresses, and a rule that is left would
// lead to the next owner of an address.
func (c chain) del(r *plugin.Request) error {
	var all error
	for i, p := range c.all(r) {
		if i < len(c)-1 || all == nil {
			all = join(all, r, p.Plugin, p.Del(p.r))
		}
	}
	return all
}

// gc has the order of DEL, so that bridge keeps an attachment of which another part could not remove everything.
func (c chain) gc(r *plugin.Request) error {
	var all error
	for _, p := range c.all(r) {
		all = join(all, r, p.Plugin, p.GC(p.r))
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
