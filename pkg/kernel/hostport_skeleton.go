// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// hostportTable is static: tables, chains and rules are made once a node, pods are elements of its maps, so that a packet costs the
// same however many pods there are.
const hostportTable = "podlace_hostport"

// schema is the version of the table.
const schema = 1

// hostportPriority lets Services, whose translation kube-proxy hooks at -100, win over hostPorts (CVE-2019-9946).
const hostportPriority = -99

// protectPriority is that of the raw table: before connection tracking.
const protectPriority = -300

// hostports builds the table.
type hostports struct{ ruleset }

func buildHostports(c *nftables.Conn) error {
	h := hostports{ruleset{c, c.AddTable(&nftables.Table{Name: hostportTable, Family: nftables.TableFamilyINet})}}
	ifnames, err := nftables.ConcatSetType(nftables.TypeIFName, nftables.TypeIFName)
	if err != nil {
		return err
	}
	hairpin := &nftables.Set{Table: h.table, Name: "hairpin", KeyType: ifnames}
	if err := c.AddSet(hairpin, nil); err != nil {
		return err
	}
	if err := h.mark(schema); err != nil {
		return err
	}
	h.protect()
	forward := h.chain("forward_ports", nil, 0, "")
	for _, hook := range []struct {
		name string
		hook *nftables.ChainHook
	}{{"prerouting", nftables.ChainHookPrerouting}, {"output", nftables.ChainHookOutput}} {
		chain := h.chain(hook.name, hook.hook, hostportPriority, nftables.ChainTypeNAT)
		// Only what is addressed to the node: never forwarded traffic (CVE-2025-67499).
		h.rule(chain, &expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true}, equal(native(unix.RTN_LOCAL)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: forward.Name})
	}
	back := h.chain("postrouting", nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
	for _, f := range []family{ipv4, ipv6} {
		if err := h.family(f, forward, back, hairpin); err != nil {
			return err
		}
	}
	return nil
}

// protect drops what comes from the network for 127.0.0.0/8 or claims to be from there. A hostPort on 127.0.0.1 needs
// route_localnet on the pods' interface, with which every pod could otherwise reach what listens on the node's loopback.
func (h hostports) protect() {
	chain := h.chain("protect_loopback", nftables.ChainHookPrerouting, protectPriority, nftables.ChainTypeFilter)
	notLo := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname("lo")}}
	for _, offset := range []uint32{ipv4.source, ipv4.destination} {
		// Every packet comes here: what nearly none has is looked at first.
		h.rule(chain, join(ipv4.only(), loopback(offset), notLo, []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})...)
	}
}

// loopback matches an IPv4 address in 127.0.0.0/8.
func loopback(offset uint32) []expr.Any {
	return []expr.Any{network(1, offset, 1), equal([]byte{127})}
}

// family is where a family's header has what, and which registers hold it: 1 is the first of 16 bytes, 8 to 11 are its quarters.
type family struct {
	digit               string
	proto               byte
	source, destination uint32 // offsets
	length              uint32
	address             nftables.SetDatatype
	second, third       uint32 // registers behind an address in register 1
}

var (
	ipv4 = family{"4", unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, 9, 10}
	ipv6 = family{"6", unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, 2, 13}
)

func (f family) only() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal([]byte{f.proto})}
}

func (h hostports) family(f family, forward, back *nftables.Chain, hairpin *nftables.Set) error {
	target := []nftables.SetDatatype{f.address, nftables.TypeInetService}
	sets := map[string]*nftables.Set{}
	for _, s := range []struct {
		name  string
		value []nftables.SetDatatype
		key   []nftables.SetDatatype
	}{
		{"hostip_ports", target, []nftables.SetDatatype{f.address, nftables.TypeInetProto, nftables.TypeInetService}},
		{"ports", target, []nftables.SetDatatype{nftables.TypeInetProto, nftables.TypeInetService}},
		{"snat", nil, []nftables.SetDatatype{f.address, nftables.TypeInetProto, nftables.TypeInetService}},
		{"masqall", nil, []nftables.SetDatatype{f.address, nftables.TypeInetProto, nftables.TypeInetService}},
	} {
		set, err := h.set(s.name+f.digit, s.value, s.key...)
		if err != nil {
			return err
		}
		sets[s.name] = set
	}
	dnat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.proto), RegAddrMin: 1, RegProtoMin: f.second}
	h.rule(forward, join(f.only(), []expr.Any{network(1, f.destination, f.length),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.second}, port(f.third), find(sets["hostip_ports"]), dnat})...)
	h.rule(forward, join(f.only(), []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, port(9), find(sets["ports"]), dnat})...)

	masquerade := &expr.Masq{}
	// mapped matches when the address at the offset is that of a pod, and the port that the client used is one of that pod's.
	mapped := func(offset uint32, set *nftables.Set) []expr.Any {
		return []expr.Any{network(1, offset, f.length), &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.second},
			&expr.Ct{Key: expr.CtKeyPROTODST, Direction: 0, Register: f.third}, &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID}}
	}
	to := func(set *nftables.Set) []expr.Any { return join(f.only(), translated(), mapped(f.destination, set)) }
	if f.digit == ipv4.digit {
		h.rule(back, join(to(sets["snat"]), loopback(f.source), []expr.Any{masquerade})...)
	}
	h.rule(back, join(to(sets["snat"]), []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 2}, &expr.Lookup{SourceRegister: 1, SetName: hairpin.Name, SetID: hairpin.ID}, masquerade})...)
	// A pod that calls itself. With bridge-nf-call-iptables the packet never leaves the bridge, and has no incoming link here.
	h.rule(back, join(to(sets["snat"]), mapped(f.source, sets["snat"]), []expr.Any{masquerade})...)
	h.rule(back, join(to(sets["masqall"]), []expr.Any{masquerade})...)
	return nil
}

// translated matches connections whose destination was translated (IPS_DST_NAT, bit 5 of the conntrack status).
func translated() []expr.Any {
	const dstNAT = 1 << 5
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(dstNAT), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(0)},
	}
}
