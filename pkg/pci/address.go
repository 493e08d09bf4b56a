// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"cmp"
	"fmt"
	"strconv"
)

// Address is where a function is on the PCI buses of a machine. It stays with the function whatever driver it has and in whatever
// namespace its interface is. Addresses can be compared by ==; the zero value is no address.
type Address struct {
	domain                uint32
	bus, device, function uint8
	valid                 bool
}

// Linux writes a domain with four digits or, behind Intel's Volume Management Device, more.
var addressForm = form(`^([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$`)

// ParseAddress reads an address as sysfs writes it, domain:bus:device.function in hexadecimal: 0000:3b:10.2.
func ParseAddress(s string) (Address, error) {
	parts := addressForm().FindStringSubmatch(s)
	if parts == nil {
		return Address{}, fmt.Errorf("PCI address %+.80q: want domain:bus:device.function, such as 0000:3b:10.2", s)
	}
	var n [4]uint64
	for i, digits := range parts[1:] {
		n[i], _ = strconv.ParseUint(digits, 16, 32)
	}
	if n[2] > 0x1f {
		return Address{}, fmt.Errorf("PCI address %+.80q: want a device of at most 1f", s)
	}
	return Address{uint32(n[0]), uint8(n[1]), uint8(n[2]), uint8(n[3]), true}, nil
}

// IsValid tells an address from the zero value.
func (a Address) IsValid() bool { return a.valid }

// String returns the address as sysfs names its folder, or "" for none.
func (a Address) String() string {
	if !a.valid {
		return ""
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.domain, a.bus, a.device, a.function)
}

// Number returns a number that no other address has.
func (a Address) Number() int64 {
	return int64(a.domain)<<16 | int64(a.bus)<<8 | int64(a.device)<<3 | int64(a.function)
}

// Compare orders addresses by domain, bus, device and function. None comes first.
func (a Address) Compare(b Address) int {
	if a.valid != b.valid {
		return cmp.Compare(len(a.String()), len(b.String()))
	}
	return cmp.Or(cmp.Compare(a.domain, b.domain), cmp.Compare(a.bus, b.bus), cmp.Compare(a.device, b.device), cmp.Compare(a.function, b.function))
}

// MarshalText returns what String does.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText is ParseAddress; nothing is no address.
func (a *Address) UnmarshalText(text []byte) (err error) {
	if len(text) == 0 {
		*a = Address{}
		return nil
	}
	*a, err = ParseAddress(string(text))
	return err
}
