// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Keywords that may replace the subnet of a range, in upper or lower case, as in Calico. usePodCidr is the node's IPv4 CIDR; without one,
// it is the IPv6 CIDR, unless the configuration also has usePodCidrIPv6, which always is the IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// podCIDRError says that the node's CIDRs are missing or wrong, so the network's configuration is not the cause.
func podCIDRError(err error) error {
	return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, noPodCIDRError{err}), "as root: "+WriteNodeFile)
}

// WriteNodeFile is the command that writes node.json with the CIDRs of the Node object NODE.
const WriteNodeFile = `mkdir -p -m 700 ` + store.Root + ` && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > ` +
	nodefile.Path + `.new && mv ` + nodefile.Path + `.new ` + nodefile.Path

// NoPodCIDR reports whether an error disappears when the agent writes the file with the node's CIDRs.
func NoPodCIDR(err error) bool { return errors.As(err, new(noPodCIDRError)) }

// noPodCIDRError wraps an error and keeps its text.
type noPodCIDRError struct{ error }

func (m noPodCIDRError) Unwrap() error { return m.error }

// resolvePodCIDRs replaces the keywords in the ranges by the node's CIDRs, whose file is read only if there are any. partial is true if
// both keywords are in use but the node has CIDRs of one family, the only one in which pods then get addresses.
func resolvePodCIDRs(r *plugin.Request, lists [][]rawRange) (resolved [][]rawRange, partial bool, err error) {
	v4, v6 := use(lists, usePodCIDR), use(lists, usePodCIDRIPv6)
	if !v4 && !v6 {
		return lists, false, nil
	}
	file, cidrs, err := nodeCIDRs(r)
	if err != nil {
		return nil, false, podCIDRError(err)
	}
	resolved, absent := withCIDRs(lists, cidrs)
	if absent != "" && v4 != v6 {
		return nil, false, podCIDRError(fmt.Errorf("%s has no %s CIDR", file, absent))
	}
	return resolved, absent != "", nil
}

func use(lists [][]rawRange, word string) bool {
	return slices.ContainsFunc(slices.Concat(lists...), func(r rawRange) bool { return strings.EqualFold(r.Subnet, word) })
}

// withCIDRs replaces the keywords in the ranges by CIDRs. It leaves out a range for whose family there is no CIDR, and a set without any
// other range. absent is the family of such a range.
func withCIDRs(lists [][]rawRange, cidrs []netip.Prefix) (resolved [][]rawRange, absent string) {
	v4, v6 := first(cidrs, true), first(cidrs, false)
	if !v4.IsValid() && !use(lists, usePodCIDRIPv6) {
		v4 = v6
	}
	for _, list := range lists {
		var rest []rawRange
		for _, raw := range list {
			cidr, family := v4, "IPv4"
			switch {
			case strings.EqualFold(raw.Subnet, usePodCIDRIPv6):
				cidr, family = v6, "IPv6"
			case !strings.EqualFold(raw.Subnet, usePodCIDR):
				rest = append(rest, raw)
				continue
			}
			if raw.Subnet = cidr.String(); cidr.IsValid() {
				rest = append(rest, raw)
			} else {
				absent = family
			}
		}
		if len(rest) > 0 || len(list) == 0 {
			resolved = append(resolved, rest)
		}
	}
	return resolved, absent
}

func first(cidrs []netip.Prefix, is4 bool) netip.Prefix {
	for _, c := range cidrs {
		if c.Addr().Is4() == is4 {
			return c
		}
	}
	return netip.Prefix{}
}

// nodeCIDRs returns the node's CIDRs and the path of their file. A CIDR that pods cannot use is an error.
func nodeCIDRs(r *plugin.Request) (file string, cidrs []netip.Prefix, err error) {
	file, node, err := nodefile.Of(r)
	for _, cidr := range node.PodCIDRs {
		if _, err := parseRange(rawRange{Subnet: cidr.String()}); err != nil {
			return "", nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return file, node.PodCIDRs, err
}
