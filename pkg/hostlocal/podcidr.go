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

// A range may contain one of these keywords instead of a subnet, in upper or lower case. Calico has the same keywords. The keyword
// usePodCidr stands for the node's IPv4 CIDR. If the node has no IPv4 CIDR, usePodCidr stands for the IPv6 CIDR, unless the configuration
// also contains usePodCidrIPv6. The keyword usePodCidrIPv6 stands for the node's IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// errNoPodCIDR identifies errors that disappear when the agent writes the file with the node's CIDRs.
var errNoPodCIDR = errors.New("no podCIDR")

// podCIDRError returns an error which says that the node's CIDRs are missing or wrong. The network's configuration is not the cause of this
// error.
func podCIDRError(err error) error {
	err = plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, err)
	return plugin.WithHint(&noPodCIDRError{err}, `write the node's CIDRs down, as root: mkdir -p -m 700 %s && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > %s.new && mv %s.new %s`,
		store.Root, nodefile.Path, nodefile.Path, nodefile.Path)
}

// NoPodCIDR reports whether an error disappears when the agent writes the file with the node's CIDRs.
func NoPodCIDR(err error) bool { return errors.Is(err, errNoPodCIDR) }

// noPodCIDRError wraps an error and keeps its text. For the wrapped error, errors.Is(err, errNoPodCIDR) is true.
type noPodCIDRError struct{ error }

func (m *noPodCIDRError) Unwrap() []error { return []error{m.error, errNoPodCIDR} }

// resolvePodCIDRs replaces the keywords in the ranges by the node's CIDRs. resolvePodCIDRs reads the file with the CIDRs only if the ranges
// contain a keyword. If the ranges contain both keywords, but the node has CIDRs of only one address family, pods get addresses of only
// this family. In this case, resolvePodCIDRs omits the range with the keyword of the missing family, and the result "partial" is true.
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

// absentCIDR replaces a keyword if the node has no CIDR of the matching address family.
const absentCIDR = "absent"

// withoutAbsent removes the ranges whose subnet is absentCIDR. withoutAbsent also removes sets without any other range.
func withoutAbsent(lists [][]rawRange) (left [][]rawRange) {
	for _, list := range lists {
		rest := slices.DeleteFunc(slices.Clone(list), func(r rawRange) bool { return r.Subnet == absentCIDR })
		if len(rest) > 0 || len(list) == 0 {
			left = append(left, rest)
		}
	}
	return left
}

// podCIDRs contains the ranges whose subnet is a keyword. Two boolean fields say which of the two keywords the ranges contain.
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

// podCIDR returns the node's CIDR that replaces a keyword, or the zero Prefix if the node has no suitable CIDR.
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

// checkCIDRs returns an error if the plugin cannot use a CIDR as a range. The caller adds the name of the file to the error.
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
