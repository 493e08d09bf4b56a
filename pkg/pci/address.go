// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Address is the address of a PCI function, which stays the same when its driver or its interface's namespace changes. Compare with ==.
// The zero value is not an address.
type Address struct {
	domain                uint32
	bus, device, function uint8
	valid                 bool
}

// ParseAddress parses an address as in sysfs, domain:bus:device.function in hexadecimal digits, such as 0000:3b:10.2. The domain has
// four digits, or more behind Intel's Volume Management Device.
func ParseAddress(s string) (Address, error) {
	domain, rest, _ := strings.Cut(s, ":")
	bus, rest, _ := strings.Cut(rest, ":")
	device, function, _ := strings.Cut(rest, ".")
	var n [4]uint64
	for i, digits := range []string{domain, bus, device, function} {
		least, most := [4]int{4, 2, 2, 1}[i], [4]int{8, 2, 2, 1}[i]
		var err error
		if n[i], err = strconv.ParseUint(digits, 16, 32); err != nil || len(digits) < least || len(digits) > most {
			return Address{}, fmt.Errorf("PCI address %+.80q: want domain:bus:device.function, such as 0000:3b:10.2", s)
		}
	}
	if n[2] > 0x1f || n[3] > 7 {
		return Address{}, fmt.Errorf("PCI address %+.80q: want a device of at most 1f and a function of at most 7", s)
	}
	return Address{uint32(n[0]), uint8(n[1]), uint8(n[2]), uint8(n[3]), true}, nil
}

// IsValid reports whether the address is not the zero value.
func (a Address) IsValid() bool { return a.valid }

// String returns the address as in sysfs, or "" for the zero value.
func (a Address) String() string {
	if !a.valid {
		return ""
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

// Number returns a number that no other PCI address has.
func (a Address) Number() int64 {
	return int64(a.domain)<<16 | int64(a.bus)<<8 | int64(a.device)<<3 | int64(a.function)
}

// Compare orders addresses by domain, bus, device and function, with the zero value first.
func (a Address) Compare(b Address) int {
	if a.valid != b.valid {
		return cmp.Compare(len(a.String()), len(b.String()))
	}
	return cmp.Or(cmp.Compare(a.domain, b.domain), cmp.Compare(a.bus, b.bus), cmp.Compare(a.device, b.device),
		cmp.Compare(a.function, b.function))
}

// MarshalText returns the same text as String.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText parses an address like ParseAddress, and an empty text as the zero value.
func (a *Address) UnmarshalText(text []byte) (err error) {
	if len(text) == 0 {
		*a = Address{}
		return nil
	}
	*a, err = ParseAddress(string(text))
	return err
}
