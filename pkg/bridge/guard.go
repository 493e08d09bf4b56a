// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// guardOf returns the guard that the configuration asks for on the port of a pod, or nil.
func (c Config) guardOf(host, pod kernel.Link, l layer3) *kernel.Guard {
	if !c.MACSpoofCheck && !c.AntiSpoof {
		return nil
	}
	g := &kernel.Guard{Link: host.Name, MAC: pod.MAC.String()}
	if c.AntiSpoof {
		for _, a := range l.addresses {
			g.Addresses = append(g.Addresses, a.Addr())
		}
	}
	return g
}

// guard protects the other pods from this one, before its port is up. When the table of guards is gone, somebody flushed it: all pods of
// the network get theirs back first.
func (j *job) guard(g *kernel.Guard) error {
	if g == nil {
		return nil
	}
	has, err := j.host.HasGuards()
	if err != nil {
		return err
	}
	if !has {
		if err := j.guardAll(); err != nil {
			return err
		}
	}
	return j.host.EnsureGuard(*g, j.alias())
}

func (j *job) guardAll() error {
	records, err := attachment.List(j.att.Network, j.r.Plugin)
	if err != nil {
		return err
	}
	for _, rec := range records {
		var st state
		if json.Unmarshal(rec.State, &st) != nil || st.Guard == nil || rec.Key == j.att.Key {
			continue
		}
		if err := j.host.EnsureGuard(*st.Guard, rec.Pod); err != nil {
			return err
		}
	}
	return nil
}

func (j *job) checkGuard(g *kernel.Guard) error {
	if g == nil {
		return nil
	}
	if !attachment.Recorded(j.r) && !j.cfg.AntiSpoof {
		if ok, err := j.host.HasReferenceSpoofCheck(asReference(j.att.Key)); ok || err != nil {
			return err
		}
	}
	return j.host.CheckGuard(*g)
}
