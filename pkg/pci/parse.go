// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// maxWord is the maximum length of a name in bytes, maxNodes the maximum number of NUMA nodes (the kernel's MAX_NUMNODES).
const (
	maxWord  = 128
	maxNodes = 1024
	maxCPUs  = 8192 // the largest NR_CPUS of the kernel
)

// parseWord refuses text that is not one word of printable ASCII, because it could garble a log.
func parseWord(s string) (string, error) {
	if len(s) > maxWord || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return "", fmt.Errorf("want one word, have %+.80q", s)
	}
	return s, nil
}

// parseID parses a vendor or product ID as in sysfs, such as 0x8086.
func parseID(s string) (string, error) {
	n, err := parseHex(s, 16)
	return fmt.Sprintf("%04x", n), err
}

func parseClass(s string) (uint32, error) {
	n, err := parseHex(s, 24)
	return uint32(n), err
}

func parseHex(s string, bits int) (uint64, error) {
	digits, ok := strings.CutPrefix(s, "0x")
	n, err := strconv.ParseUint(digits, 16, 32)
	if !ok || err != nil || n >= 1<<bits {
		return 0, fmt.Errorf("want a hexadecimal number of %d bits, have %+.80q", bits, s)
	}
	return n, nil
}

// parseNode parses the number of a NUMA node or IOMMU group; a negative one is Unknown.
func parseNode(s string) (int, error) {
	n, err := parseNumber(s)
	return max(n, Unknown), err
}

// parseNumber parses a number of at most 32 bits. With an error it returns Unknown.
func parseNumber(s string) (int, error) {
	n, err := strconv.ParseInt(s, 10, 33)
	if err != nil {
		return Unknown, fmt.Errorf("want a number, have %+.80q", s)
	}
	return int(n), nil
}

func parseCount(s string) (int, error) {
	n, err := parseNumber(s)
	if err != nil || n < 0 || n > math.MaxInt32 {
		return 0, fmt.Errorf("want a number from 0, have %+.80q", s)
	}
	return n, nil
}

func parseCarrier(s string) (bool, error) {
	if s != "0" && s != "1" {
		return false, fmt.Errorf("want 0 or 1, have %+.80q", s)
	}
	return s == "1", nil
}

// parseLinkType parses the hardware type of an interface (ARPHRD_*); types other than Ether and InfiniBand become "".
func parseLinkType(s string) (string, error) {
	n, err := parseCount(s)
	return map[int]string{1: Ether, 32: InfiniBand}[n], err
}

// parseErrors returns the total of aer_dev_fatal or aer_dev_nonfatal, which is in a line such as "TOTAL_ERR_FATAL 3".
func parseErrors(s string) (uint64, error) {
	for line := range strings.Lines(s) {
		if fields := strings.Fields(line); len(fields) == 2 && strings.HasPrefix(fields[0], "TOTAL_ERR_") {
			n, err := strconv.ParseUint(fields[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("want a number of errors, have %+.80q", fields[1])
			}
			return n, nil
		}
	}
	return 0, fmt.Errorf("want a line TOTAL_ERR_*, have %+.80q", s)
}

// parseDistances parses the distances from one NUMA node to all nodes, such as "10 21".
func parseDistances(s string) (distances []int, err error) {
	for _, field := range strings.Fields(s) {
		n, err := parseCount(field)
		if err != nil || len(distances) == maxNodes {
			return nil, fmt.Errorf("want distances, have %+.80q", s)
		}
		distances = append(distances, n)
	}
	return distances, nil
}

// parseList parses an ascending list of numbers below a limit, such as "0-1,4".
func parseList(s string, limit int) (list []int, err error) {
	for part := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := parseCount(first)
		to, err2 := parseCount(last)
		if err1 != nil || err2 != nil || from > to || to >= limit || len(list) > 0 && list[len(list)-1] >= from {
			return nil, fmt.Errorf("want a list such as 0-1,4, have %+.80q", s)
		}
		for n := from; n <= to; n++ {
			list = append(list, n)
		}
	}
	return list, nil
}

// parseRoot returns the root of the PCI hierarchy in the sysfs path of a function, such as pci0000:3a of
// ../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0.
func parseRoot(target string) string {
	_, rest, _ := strings.Cut(target, "/")
	for part, rest, isFolder := strings.Cut(rest, "/"); isFolder; part, rest, isFolder = strings.Cut(rest, "/") {
		name, isRoot := strings.CutPrefix(part, "pci")
		if _, err := ParseAddress(name + ":00.0"); isRoot && err == nil {
			return part
		}
	}
	return ""
}

// parseVF returns the index in the name of a PF's link to a VF, such as virtfn2.
func parseVF(name string) (index int, ok bool) {
	digits, ok := strings.CutPrefix(name, "virtfn")
	index, err := strconv.Atoi(digits)
	if !ok || err != nil || index < 0 || index > 1<<16-1 || strconv.Itoa(index) != digits {
		return Unknown, false
	}
	return index, true
}

// isRepresentor reports whether phys_switch_id and phys_port_name are those of a representor, an interface of the card's switch that
// stands for a PF, VF or subfunction, and not of the PF's own interface. Older drivers take the VF's number as port name.
func isRepresentor(switchID, port string) bool {
	return isFunctionPort(port) || switchID != "" && port != "" && !isUplinkPort(port)
}

// isUplinkPort reports whether a port name is that of a physical port, such as p0, or of a part of a split one, such as p0s1
// (devlink-port(8)).
func isUplinkPort(port string) bool {
	rest, ok := cutNumbered(port, "p")
	if split, isSplit := cutNumbered(rest, "s"); isSplit {
		rest = split
	}
	return ok && rest == ""
}

// isFunctionPort reports whether a port name is that of a representor on any controller, such as pf0vf3 or c1pf0sf88.
func isFunctionPort(port string) bool {
	if rest, ok := cutNumbered(port, "c"); ok {
		port = rest
	}
	rest, ok := cutNumbered(port, "pf")
	for _, kind := range []string{"vf", "sf"} {
		if function, is := cutNumbered(rest, kind); is {
			rest = function
			break
		}
	}
	return ok && rest == ""
}

// cutNumbered returns what follows the prefix and a number in s; ok is false if s does not begin with them.
func cutNumbered(s, prefix string) (rest string, ok bool) {
	digits, ok := strings.CutPrefix(s, prefix)
	rest = strings.TrimLeft(digits, "0123456789")
	if !ok || rest == digits {
		return s, false
	}
	return rest, true
}
