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

// Words that may stand in the place of a subnet, in any case of letters; Calico has them too. The first means the node's IPv4 CIDR, and
// without the second also its IPv6 CIDR where it has no other; the second means the IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// errNoPodCIDR marks the errors that go away when the node's file is written.
var errNoPodCIDR = errors.New("no podCIDR")

// podCIDRError is an error about the node's CIDRs: a wrong configuration of the node, not of the network.
func podCIDRError(err error) error {
	err = plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, err)
	return plugin.WithHint(&marked{err}, `write the node's CIDRs down, as root: mkdir -p -m 700 %s && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > %s.new && mv %s.new %s`,
		store.Root, nodefile.Path, nodefile.Path, nodefile.Path)
}

// marked makes errors.Is find errNoPodCIDR in an error without a word of it in the text.
type marked struct{ error }

func (m *marked) Unwrap() []error { return []error{m.error, errNoPodCIDR} }

// resolvePodCIDRs puts the node's CIDRs in the place of the words. The file is read only when a word is there. With both words, a node
// whose CIDRs are of one family gives addresses of that family alone: the range of the other word is left out, and partial is true.
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

// absent is in the place of the word for a family that the node has no CIDR of.
const absent = "absent"

// withoutAbsent leaves out such ranges, and sets that have no other.
func withoutAbsent(lists [][]rawRange) (left [][]rawRange) {
	for _, list := range lists {
		rest := slices.DeleteFunc(slices.Clone(list), func(r rawRange) bool { return r.Subnet == absent })
		if len(rest) > 0 || len(list) == 0 {
			left = append(left, rest)
		}
	}
	return left
}

// podCIDRs are the ranges whose subnet is a word, and which of the two words are among them.
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

// podCIDR returns the CIDR that a word stands for, invalid if the node has none of the family.
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

// nodeCIDRs returns the CIDRs of this node, and the file that they are from.
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

// checkCIDRs refuses what no range can be made of, while the file that it is from is known.
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
