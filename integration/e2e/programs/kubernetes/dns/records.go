// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

// podRecords returns the record of a name such as 10-244-0-5.NAMESPACE.pod, even if no pod has the address.
func podRecords(q dnsmessage.Question, name string) ([]dnsmessage.Resource, dnsmessage.RCode) {
	host, _, found := strings.Cut(name, ".")
	for _, separator := range []string{".", ":"} {
		if addr := parseAddr(strings.ReplaceAll(host, "-", separator)); found && addr.IsValid() {
			return addressRecord(q, addr), dnsmessage.RCodeSuccess
		}
	}
	return nil, dnsmessage.RCodeNameError
}

// serviceRecords returns one SRV record for each pair of endpoint name and port of a Service.
func serviceRecords(q dnsmessage.Question, all []endpoint, name, protocol, base string) ([]dnsmessage.Resource, dnsmessage.RCode) {
	var answers []dnsmessage.Resource
	var seen []string
	for _, e := range all {
		target := strings.TrimPrefix(e.name+"."+base, ".")
		for _, p := range e.ports {
			key := fmt.Sprint(target, p.number)
			if p.name != name || p.protocol != protocol || slices.Contains(seen, key) {
				continue
			}
			seen = append(seen, key)
			to, err := dnsmessage.NewName(target)
			if err != nil {
				return nil, dnsmessage.RCodeServerFailure
			}
			answers = append(answers, only(q, dnsmessage.TypeSRV, &dnsmessage.SRVResource{Weight: 1, Port: p.number, Target: to})...)
		}
	}
	if len(seen) == 0 {
		return nil, dnsmessage.RCodeNameError
	}
	return answers, dnsmessage.RCodeSuccess
}

// addressRecord returns the A or AAAA record of an address if the question asks for this type.
func addressRecord(q dnsmessage.Question, addr netip.Addr) []dnsmessage.Resource {
	switch {
	case addr.Is4():
		return only(q, dnsmessage.TypeA, &dnsmessage.AResource{A: addr.As4()})
	case addr.Is6():
		return only(q, dnsmessage.TypeAAAA, &dnsmessage.AAAAResource{AAAA: addr.As16()})
	}
	return nil
}

func only(q dnsmessage.Question, want dnsmessage.Type, body dnsmessage.ResourceBody) []dnsmessage.Resource {
	if q.Type != want {
		return nil
	}
	return []dnsmessage.Resource{record(q, body)}
}

func record(q dnsmessage.Question, body dnsmessage.ResourceBody) dnsmessage.Resource {
	return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: ttl}, Body: body}
}

// parseAddr parses an IP address; the result for an invalid text is the zero value.
func parseAddr(ip string) netip.Addr {
	addr, _ := netip.ParseAddr(ip)
	return addr
}

// dashedName returns the name of an endpoint without a hostname: the endpoint's address with dashes.
func dashedName(addr netip.Addr) string {
	return strings.NewReplacer(".", "-", ":", "-").Replace(addr.String())
}

// reverseName returns the name of an address in in-addr.arpa or ip6.arpa.
func reverseName(addr netip.Addr) string {
	var b strings.Builder
	bytes := addr.AsSlice()
	for _, one := range slices.Backward(bytes) {
		if addr.Is4() {
			fmt.Fprintf(&b, "%d.", one)
		} else {
			fmt.Fprintf(&b, "%x.%x.", one&15, one>>4)
		}
	}
	if addr.Is4() {
		return b.String() + "in-addr.arpa."
	}
	return b.String() + "ip6.arpa."
}
