// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/reference"
)

// Recorded is the part of a record that node-wide commands use.
type Recorded struct {
	Addresses []netip.Prefix // with the prefix length of their subnet
	DataDir   string         // data directory of the IPAM plugin; "" for its default
}

// FromRecord decodes an attachment's record.
func FromRecord(rec attachment.Record) (Recorded, error) {
	st, err := attachment.StateOf[state](rec)
	var ipam struct {
		DataDir string `json:"dataDir"`
	}
	_ = json.Unmarshal(st.IPAM, &ipam)
	return Recorded{st.Addresses, ipam.DataDir}, err
}

var errNoConfiguration = errors.New("no configuration of this network names the plugin bridge")

// ToReference returns the steps that replace an attachment's rules by ones that the reference plugin's DEL can remove. addresses are all
// addresses of the container in the network, because the reference plugin has one iptables chain for them. Podlace's own nftables rules
// stay, because the rollback removes them with their tables.
func ToReference(rec attachment.Record, addresses []netip.Prefix, conf json.RawMessage) ([]attachment.Step, error) {
	st, err := attachment.StateOf[state](rec)
	if err != nil {
		return nil, err
	}
	guard, err := referenceGuard(rec, st.Guard, conf)
	if err != nil {
		return nil, err
	}
	if st.Guard.checksSources() {
		guard = append(guard, attachment.Step{Text: "group_fwd_mask of its bridge port: 0", Do: func() error { return resetPort(st.Guard.Link) }})
	}
	masquerade, err := masqueradeSteps(rec, st, addresses, conf)
	return append(guard, masquerade...), err
}

func resetPort(name string) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	port, ok, err := host.Link(name)
	if err != nil || !ok || port.Master == 0 {
		return err
	}
	return host.ResetReserved(port)
}

// referenceGuard returns the steps that write the reference plugin's MAC check, if the configuration has macspoofchk. That plugin does not
// check IP addresses, so the rollback ends the protection against forged ones.
func referenceGuard(rec attachment.Record, guard *Guard, conf json.RawMessage) ([]attachment.Step, error) {
	if !guard.checksSources() {
		return nil, nil
	}
	if conf == nil {
		return nil, errNoConfiguration
	}
	var keys struct {
		MACSpoofCheck bool `json:"macspoofchk"`
	}
	if err := json.Unmarshal(conf, &keys); err != nil {
		return nil, err
	}
	mac, err := net.ParseMAC(guard.MAC)
	if err != nil || !keys.MACSpoofCheck {
		return []attachment.Step{{Text: "NOTE: the protection of its neighbours ends, the configuration has no macspoofchk"}}, err
	}
	return []attachment.Step{{Text: "check its MAC by rules of nftables", Do: func() error {
		return reference.Bridge(reference.Of(rec.Key)).WriteSpoofCheck(guard.Link, mac)
	}}}, nil
}

func masqueradeSteps(rec attachment.Record, st state, addresses []netip.Prefix, conf json.RawMessage) ([]attachment.Step, error) {
	named := reference.KeyOf(rec.Key)
	switch chain := masqueradeChain(rec.Key); {
	case st.Masquerade == "":
		return nil, nil
	case st.Masquerade == "iptables" && rec.Key == named:
		return []attachment.Step{{Text: "remove iptables chain " + chain + " of table mangle",
			Do: func() error { return iptables.RemoveMangle(chain) }}}, nil
	}
	m, err := referenceMasquerade(conf)
	if err != nil {
		return nil, err
	}
	if m.UseCluster {
		m = m.withClusterCIDRs(st.clusterCIDRs(rec.Network))
	}
	if m.Backend == "" {
		return []attachment.Step{{Text: "NOTE: the configuration has no ipMasq any more, so its masquerade ends"}}, nil
	}
	own, all := m.ofMasqueradedFamilies(st.Addresses), m.ofMasqueradedFamilies(addresses)
	steps := []attachment.Step{{Text: fmt.Sprintf("masquerade %s by rules of %s", list(own), m.Backend), Do: func() error {
		if m.Backend == "iptables" {
			return masqueradeByIPTables(named, all, m.ofMasqueradedFamilies(m.Except), true)
		}
		return reference.Bridge(reference.Of(rec.Key)).WriteMasquerade(own, m.ofMasqueradedFamilies(m.Except))
	}}}
	if st.Masquerade == "iptables" {
		steps = append(steps, attachment.Step{Text: "remove iptables chain " + masqueradeChain(rec.Key),
			Do: func() error { return iptables.RemoveChain("POSTROUTING", masqueradeChain(rec.Key)) }})
	}
	return steps, nil
}

// referenceMasquerade returns the configured masquerade with the backend that the reference plugin would choose. It keeps address families
// and exceptions, for which that plugin has no keys, in a format that its DEL can remove.
func referenceMasquerade(conf json.RawMessage) (Masquerade, error) {
	if conf == nil {
		return Masquerade{}, errNoConfiguration
	}
	var raw rawConfig
	if err := json.Unmarshal(conf, &raw); err != nil {
		return Masquerade{}, err
	}
	cfg := Config{IPAM: ipam.Type(raw.IPAM)}
	if err := parseMasquerade(&cfg, raw, nil); err != nil || cfg.Masquerade.Backend == "" {
		return Masquerade{}, err
	}
	named := ""
	if raw.IPMasqBackend != nil {
		named = *raw.IPMasqBackend
	}
	cfg.Masquerade.Backend = reference.Backend(named)
	return cfg.Masquerade, nil
}

func list(addresses []netip.Prefix) string {
	var out []string
	for _, a := range addresses {
		out = append(out, a.Addr().String())
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}
