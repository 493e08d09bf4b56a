// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Words that may stand in the place of a subnet, in any case of letters; Calico has them too. The first means the node's IPv4 CIDR, and
// its IPv6 CIDR where it has no other; the second the IPv6 CIDR.
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

// resolvePodCIDRs puts the node's CIDRs in the place of the words. The file is read only when a word is there.
func resolvePodCIDRs(lists [][]rawRange) error {
	words, both := podCIDRWords(lists)
	if len(words) == 0 {
		return nil
	}
	file, cidrs, err := nodeCIDRs()
	if err != nil {
		return podCIDRError(err)
	}
	for _, word := range words {
		cidr, family := podCIDR(word.Subnet, both, cidrs)
		if !cidr.IsValid() {
			return podCIDRError(fmt.Errorf("%s has no %s CIDR", file, family))
		}
		word.Subnet = cidr.String()
	}
	return nil
}

// podCIDRWords returns the ranges whose subnet is a word; both reports whether the word for IPv6 is among them.
func podCIDRWords(lists [][]rawRange) (words []*rawRange, both bool) {
	for _, list := range lists {
		for i := range list {
			is6 := strings.EqualFold(list[i].Subnet, usePodCIDRIPv6)
			if both = both || is6; is6 || strings.EqualFold(list[i].Subnet, usePodCIDR) {
				words = append(words, &list[i])
			}
		}
	}
	return words, both
}

// podCIDR returns the CIDR that a word stands for, invalid if the node has none of the family.
func podCIDR(word string, both bool, cidrs []netip.Prefix) (cidr netip.Prefix, family string) {
	if strings.EqualFold(word, usePodCIDRIPv6) {
		return first(cidrs, false), "IPv6"
	}
	if cidr = first(cidrs, true); !cidr.IsValid() && !both {
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
func nodeCIDRs() (file string, cidrs []netip.Prefix, err error) {
	file, node, err := nodefile.Read()
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
