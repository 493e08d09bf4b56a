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

// Words that may replace a subnet, in any case; Calico has them too. usePodCidr stands for the node's IPv4 CIDR. Without the second word it
// also stands for the IPv6 CIDR of a node without an IPv4 CIDR. The second word stands for the IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// errNoPodCIDR marks errors that disappear when the node's file is written.
var errNoPodCIDR = errors.New("no podCIDR")

// podCIDRError returns an error about the node's CIDRs: the node is misconfigured, not the network.
func podCIDRError(err error) error {
	err = plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, err)
	return plugin.WithHint(&marked{err}, `write the node's CIDRs down, as root: mkdir -p -m 700 %s && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > %s.new && mv %s.new %s`,
		store.Root, nodefile.Path, nodefile.Path, nodefile.Path)
}

// NoPodCIDR reports whether an error disappears when the node's file is written.
func NoPodCIDR(err error) bool { return errors.Is(err, errNoPodCIDR) }

// marked adds errNoPodCIDR to an error for errors.Is, without changing its text.
type marked struct{ error }

func (m *marked) Unwrap() []error { return []error{m.error, errNoPodCIDR} }

// resolvePodCIDRs replaces the words by the node's CIDRs. It reads the file only if a word is present. With both words, a node that has
// CIDRs of one family assigns addresses of that family only. The other word's range is left out, and partial is true.
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
			word.Subnet, partial = absent, true
		default:
			return nil, false, podCIDRError(fmt.Errorf("%s has no %s CIDR", file, family))
		}
	}
	if partial {
		lists = withoutAbsent(lists)
	}
	return lists, partial, nil
}

// absent replaces the word for a family of which the node has no CIDR.
const absent = "absent"

// withoutAbsent removes absent ranges, and sets without other ranges.
func withoutAbsent(lists [][]rawRange) (left [][]rawRange) {
	for _, list := range lists {
		rest := slices.DeleteFunc(slices.Clone(list), func(r rawRange) bool { return r.Subnet == absent })
		if len(rest) > 0 || len(list) == 0 {
			left = append(left, rest)
		}
	}
	return left
}

// podCIDRs holds the ranges whose subnet is a word, and which of the two words occur.
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

// podCIDR returns the CIDR for a word. It is invalid if the node has none of the family.
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

// nodeCIDRs returns the CIDRs of this node, and the path of their file.
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

// checkCIDRs rejects CIDRs that cannot be a range. It runs here so that the error can name the file.
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
