// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Words that may stand in the place of a subnet, in any case of letters; Calico has them too. The first means the node's IPv4 CIDR, and
// its IPv6 CIDR where it has no other; the second the IPv6 CIDR.
const (
	usePodCIDR     = "usePodCidr"
	usePodCIDRIPv6 = "usePodCidrIPv6"
)

// Where the CIDRs of a node are found; the first file that is there counts. The API server is never asked: a pod must be able to start
// while it is away.
const (
	nodeFile    = store.Root + "/node.json"
	flannelFile = "/run/flannel/subnet.env"
)

// maxNodeFile bounds what is read; either file has some hundred bytes.
const maxNodeFile = 64 << 10

// errNoPodCIDR marks the errors that go away when the node's file is written.
var errNoPodCIDR = errors.New("no podCIDR")

// podCIDRError is an error about the node's CIDRs: a wrong configuration of the node, not of the network.
func podCIDRError(err error) error {
	err = plugin.Errorf(plugin.CodeConfig, "ipam subnet %s: %w", usePodCIDR, err)
	return plugin.WithHint(&marked{err}, `write the node's CIDRs down, as root: mkdir -p -m 700 %s && kubectl get node NODE -o jsonpath='{"{"}"podCIDRs":{.spec.podCIDRs}{"}"}' > %s.new && mv %s.new %s`,
		store.Root, nodeFile, nodeFile, nodeFile)
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
	for _, source := range []struct {
		file  string
		parse func([]byte) ([]netip.Prefix, error)
	}{{nodeFile, parseNodeFile}, {flannelFile, parseFlannelFile}} {
		data, err := readSmall(source.file, maxNodeFile, unix.O_NOFOLLOW)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", nil, err
		}
		if cidrs, err = source.parse(data); err == nil {
			err = checkCIDRs(cidrs)
		}
		if err != nil {
			return "", nil, fmt.Errorf("%s: %w", source.file, err)
		}
		return source.file, cidrs, nil
	}
	return "", nil, fmt.Errorf("neither %s nor %s is there", nodeFile, flannelFile)
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

func parseNodeFile(data []byte) ([]netip.Prefix, error) {
	var node struct {
		PodCIDRs []string `json:"podCIDRs"`
	}
	if json.Unmarshal(data, &node) != nil || len(node.PodCIDRs) == 0 {
		return nil, errors.New(`want {"podCIDRs": ["10.58.1.0/24", "fd00:58:1::/64"]}, with one CIDR at least`)
	}
	var cidrs []netip.Prefix
	for _, s := range node.PodCIDRs {
		cidr, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("podCIDRs: %q is no CIDR", s)
		}
		cidrs = append(cidrs, cidr)
	}
	return cidrs, nil
}

// parseFlannelFile reads the variables that flannel writes. A value is the address of flannel's own bridge, with the length of the subnet.
func parseFlannelFile(data []byte) ([]netip.Prefix, error) {
	var cidrs []netip.Prefix
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if key != "FLANNEL_SUBNET" && key != "FLANNEL_IPV6_SUBNET" {
			continue
		}
		cidr, err := netip.ParsePrefix(strings.Trim(value, `"'`))
		if err != nil {
			return nil, fmt.Errorf("%s %q is no CIDR", key, value)
		}
		cidrs = append(cidrs, cidr.Masked())
	}
	if len(cidrs) == 0 {
		return nil, errors.New("has neither FLANNEL_SUBNET nor FLANNEL_IPV6_SUBNET")
	}
	return cidrs, nil
}

// readSmall reads a regular file of at most most bytes; flags are further ones for open(2).
func readSmall(path string, most int64, flags int) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|flags, 0) // O_NONBLOCK: a FIFO must not block
	if errors.Is(err, unix.ELOOP) && flags&unix.O_NOFOLLOW != 0 {
		return nil, fmt.Errorf("%q is a symbolic link: want a regular file", path)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q: want a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%q: larger than %d bytes", path, most)
	}
	return data, err
}
