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

// These keywords may replace a subnet. The keywords may be written in upper or lower case. Calico has the same keywords. The keyword
// usePodCidr stands for the node's IPv4 CIDR. In a configuration without usePodCidrIPv6, the keyword usePodCidr stands for the node's IPv6
// CIDR if the node has no IPv4 CIDR. The keyword usePodCidrIPv6 stands for the node's IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// errNoPodCIDR marks errors that disappear as soon as the file with the node's CIDRs is written.
var errNoPodCIDR = errors.New("no podCIDR")

// podCIDRError returns an error which says that the node's CIDRs are missing or wrong. The network's configuration is not the cause.
func podCIDRError(err error) error {
	err = plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, err)
	return plugin.WithHint(&noPodCIDRError{err}, `write the node's CIDRs down, as root: mkdir -p -m 700 %s && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > %s.new && mv %s.new %s`,
		store.Root, nodefile.Path, nodefile.Path, nodefile.Path)
}

// NoPodCIDR reports whether an error disappears as soon as the file with the node's CIDRs is written.
func NoPodCIDR(err error) bool { return errors.Is(err, errNoPodCIDR) }

// noPodCIDRError wraps an error so that it matches errNoPodCIDR (errors.Is). The text of the error stays the same.
type noPodCIDRError struct{ error }

func (m *noPodCIDRError) Unwrap() []error { return []error{m.error, errNoPodCIDR} }

// resolvePodCIDRs replaces the keywords in the ranges by the node's CIDRs. The file with the CIDRs is read only if the ranges contain a
// keyword. If the ranges contain both keywords, a node may have CIDRs of only one family. Pods then get addresses of this family only. In
// this case, the range with the other keyword is left out, and the second result is true.
func resolvePodCIDRs(r *plugin.Request, lists [][]rawRange) (resolved [][]rawRange, partial bool, err error) {
	words := podCIDRWords(lists)
	if len(words.ranges) == 0 {
		return lists, false, nil
	}
	file, cidrs, err := nodeCIDRs(r)
	if err != nil {
		return nil, false, podCIDRError(err)
	}
	for _, word := range words.ranges {
		cidr, family := words.podCIDR(word.Subnet, cidrs)
		switch {
		case cidr.IsValid():
			word.Subnet = cidr.String()
		case words.v4 && words.v6:
			word.Subnet, partial = absentCIDR, true
		default:
			return nil, false, podCIDRError(fmt.Errorf("%s has no %s CIDR", file, family))
		}
	}
	if partial {
		lists = withoutAbsent(lists)
	}
	return lists, partial, nil
}

// absentCIDR replaces a keyword if the node has no CIDR of the keyword's family.
const absentCIDR = "absent"

// withoutAbsent removes the ranges whose subnet is absentCIDR. Sets without any other range are also removed.
func withoutAbsent(lists [][]rawRange) (left [][]rawRange) {
	for _, list := range lists {
		rest := slices.DeleteFunc(slices.Clone(list), func(r rawRange) bool { return r.Subnet == absentCIDR })
		if len(rest) > 0 || len(list) == 0 {
			left = append(left, rest)
		}
	}
	return left
}

// podCIDRs contains the ranges whose subnet is a keyword. The two booleans report which keywords occur.
type podCIDRs struct {
	ranges []*rawRange
	v4, v6 bool
}

func podCIDRWords(lists [][]rawRange) (words podCIDRs) {
	for _, list := range lists {
		for i := range list {
			is4, is6 := strings.EqualFold(list[i].Subnet, usePodCIDR), strings.EqualFold(list[i].Subnet, usePodCIDRIPv6)
			words.v4, words.v6 = words.v4 || is4, words.v6 || is6
			if is4 || is6 {
				words.ranges = append(words.ranges, &list[i])
			}
		}
	}
	return words
}

// podCIDR returns the node's CIDR that replaces a keyword. If the node has no suitable CIDR, the result is the zero Prefix.
func (w podCIDRs) podCIDR(word string, cidrs []netip.Prefix) (cidr netip.Prefix, family string) {
	if strings.EqualFold(word, usePodCIDRIPv6) {
		return first(cidrs, false), "IPv6"
	}
	if cidr = first(cidrs, true); !cidr.IsValid() && !w.v6 {
		cidr = first(cidrs, false)
	}
	return cidr, "IPv4"
}

func first(cidrs []netip.Prefix, is4 bool) netip.Prefix {
	for _, c := range cidrs {
		if c.Addr().Is4() == is4 {
			return c
		}
	}
	return netip.Prefix{}
}

// nodeCIDRs returns the CIDRs of this node, and the path of the file that contains them.
func nodeCIDRs(r *plugin.Request) (file string, cidrs []netip.Prefix, err error) {
	file, node, err := nodefile.Of(r)
	if err != nil {
		return "", nil, err
	}
	if err := checkCIDRs(node.PodCIDRs); err != nil {
		return "", nil, fmt.Errorf("%s: %w", file, err)
	}
	return file, node.PodCIDRs, nil
}

// checkCIDRs returns an error if a CIDR cannot be used as a range. The caller adds the file's name to the error.
func checkCIDRs(cidrs []netip.Prefix) error {
	for _, cidr := range cidrs {
		r, err := parseRange(rawRange{Subnet: cidr.String()})
		if err == nil {
			err = r.forPods()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
