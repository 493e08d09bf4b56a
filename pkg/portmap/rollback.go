// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/ports"
	"github.com/podlace/podlace/pkg/reference"
)

// ToReference returns functions to be run in order: the first write the reference plugin's rules for an attachment's ports, so that its DEL
// can remove them, and the last remove those of Podlace. The addresses must have the prefix lengths of their subnets.
func ToReference(host *kernel.Node, rec attachment.Record, addresses []netip.Prefix, conf json.RawMessage) ([]attachment.Step, error) {
	st, err := attachment.StateOf[portState](rec)
	if err != nil {
		return nil, err
	}
	named := reference.KeyOf(rec.Key)
	if len(st.Ports) == 0 {
		return nil, nil
	}
	var localhostSteps []attachment.Step
	if st.Localhost != "" {
		localhostSteps = []attachment.Step{{Text: "leave route_localnet of " + st.Localhost + " on",
			Do: func() error { return leaveLoopbackOpen(host, st.Localhost) }}}
	}
	if st.Backend == "iptables" && rec.Key == named {
		return localhostSteps, nil
	}
	if conf == nil {
		return nil, fmt.Errorf("no configuration of this network names the plugin portmap")
	}
	var raw rawConfig
	if err := json.Unmarshal(conf, &raw); err != nil {
		return nil, err
	}
	backend := ""
	if raw.Backend != nil {
		backend = *raw.Backend
	}
	backend = reference.Backend(backend)
	cfg := Config{Backend: backend, SNAT: st.Ports[0].SNAT, MasqAll: st.Ports[0].MasqAll}
	for _, step := range []func(*Config, rawConfig) error{parseIPTables, parseConditions} {
		if err := step(&cfg, raw); err != nil {
			return nil, err
		}
	}
	return append(localhostSteps, []attachment.Step{
		{Text: fmt.Sprintf("forward hostPort %s by rules of %s", ports.Names(st.Ports), backend), Do: func() error {
			if backend == "iptables" {
				as := portState{Backend: backend, Ports: ports.Singles(st.Ports), Rules: cfg.forPod(withSubnets(st.Ports, addresses))}
				return addByIPTables(named, as, slog.Default())
			}
			return reference.Portmap(reference.Of(rec.Key)).Write(ports.Singles(st.Ports))
		}},
		{Text: "remove its hostPorts of Podlace", Do: func() error {
			unlock, err := attachment.Waiting.Node(portsLock)
			if err != nil {
				return err
			}
			defer unlock()
			own, err := ownedBy(host, st.hostPorts(ownerComment(rec.Key, rec.Pod)))
			if err != nil {
				return err
			}
			as := st
			as.Localhost = "" // the reference's rules need route_localnet too
			return endPorts(host, rec.Key, as, own)
		}},
	}...), nil
}

// Targets returns the pod addresses to which the ports of an attachment are forwarded.
func Targets(rec attachment.Record) (addresses []netip.Addr, err error) {
	st, err := attachment.StateOf[portState](rec)
	for _, p := range st.Ports {
		addresses = append(addresses, p.To.Addr())
	}
	return addresses, err
}

// EndPorts removes the hostPorts of an attachment whose pod is gone.
func EndPorts(host *kernel.Node, rec attachment.Record) error {
	st, err := attachment.StateOf[portState](rec)
	if err != nil {
		return err
	}
	return endForwarding(host, rec.Key, st, nil)
}

// withSubnets returns the target addresses of ports with the prefix lengths of their subnets, or 32 and 128 if unknown.
func withSubnets(list []ports.Port, addresses []netip.Prefix) (pods []netip.Prefix) {
	for _, p := range list {
		of := netip.PrefixFrom(p.To.Addr(), p.To.Addr().BitLen())
		if i := slices.IndexFunc(addresses, func(a netip.Prefix) bool { return a.Addr() == p.To.Addr() }); i >= 0 {
			of = addresses[i]
		}
		if !slices.Contains(pods, of) {
			pods = append(pods, of)
		}
	}
	return pods
}
