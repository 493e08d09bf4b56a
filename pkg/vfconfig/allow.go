// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

// Range is a range of integers that includes both From and To.
type Range struct{ From, To int }

// Has reports whether a number is in the range.
func (r Range) Has(n int) bool { return r.From <= n && n <= r.To }

// ParseRanges parses numbers and ranges, such as "100-199,300". check returns an error for a number that is not allowed.
func ParseRanges(s string, check func(n int) error) (ranges []Range, err error) {
	for part := range strings.SplitSeq(s, ",") {
		first, last, two := strings.Cut(strings.TrimSpace(part), "-")
		if !two {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		switch err := cmp.Or(check(from), check(to)); {
		case err1 != nil || err2 != nil:
			return nil, errors.New("want numbers and ranges, such as 100-199,300")
		case from > to:
			return nil, fmt.Errorf("%d-%d: want the smaller number first", from, to)
		case err != nil:
			return nil, err
		}
		ranges = append(ranges, Range{from, to})
	}
	return ranges, nil
}

// Allowance maps each key that claims may set to the allowed ranges of numbers; none means any valid value.
type Allowance map[string][]Range

// DefaultAllowance returns the keys that claims may set unless the configuration says otherwise. None of them protects other pods or
// the network from the pod.
func DefaultAllowance() Allowance {
	return Allowance{"mac": nil, "ips": nil, "ifName": nil, "mtu": nil}
}

// Allow permits claims to set a key to any valid value.
func (a Allowance) Allow(key string) error {
	if (&Config{}).fieldOf(key) == nil {
		return errors.New("unknown key; " + strict.Hint(key, Keys()))
	}
	if _, again := a[key]; again {
		return errors.New("duplicate key")
	}
	a[key] = nil
	return nil
}

// Limit permits claims to set a numeric key within a limit: ranges such as "100-199,300", or a number that is the maximum.
func (a Allowance) Limit(key string, limit strict.Value) error {
	if err := a.Allow(key); err != nil {
		return err
	}
	if _, number := (&Config{}).fieldOf(key).(**int); !number {
		return fmt.Errorf("%s: only numbers can have a limit: list %q itself, which allows any valid value", limit, key)
	}
	ranges, err := parseLimit(key, limit)
	a[key] = ranges
	return err
}

func parseLimit(key string, limit strict.Value) (ranges []Range, err error) {
	switch data := limit.Data.(type) {
	case string:
		ranges, err := ParseRanges(data, func(n int) error { return checkNumber(key, n) })
		if err != nil {
			return nil, fmt.Errorf("%s: %w", limit, err)
		}
		return ranges, nil
	case json.Number:
		if key == "vlan" {
			return nil, fmt.Errorf(`%s: want ranges in quotes, such as "100-199,300"`, limit)
		}
		most, err := strconv.Atoi(string(data))
		if err == nil {
			err = checkNumber(key, most)
		}
		if err != nil || most == 0 {
			return nil, fmt.Errorf("%s: want the maximum that a claim may set", limit)
		}
		return []Range{{smallestValue(key), most}}, nil
	}
	return nil, fmt.Errorf(`%s: want ranges such as "100-199,300", or a number for the maximum`, limit)
}

// smallestValue returns the smallest allowed value of a key for which the admin has set only a maximum. It is 1 where 0 means "no
// limit".
func smallestValue(key string) int {
	switch key {
	case "maxTxRate":
		return 1
	case "mtu":
		return 68
	}
	return 0
}

// Check returns an error for a setting that claims may not set, with the key, the value and the allowed values.
func (a Allowance) Check(c *Config) error {
	for _, key := range c.Set() {
		ranges, ok := a[key]
		if !ok {
			return fmt.Errorf("%s %s: claims may not set it; they may set: %s", key, c.Text(key), a)
		}
		n, number := c.fieldOf(key).(**int)
		if number && len(ranges) > 0 && !slices.ContainsFunc(ranges, func(r Range) bool { return r.Has(**n) }) {
			return fmt.Errorf("%s %s: claims may set %s", key, c.Text(key), text(ranges))
		}
	}
	return nil
}

// String returns the allowed settings in one line, such as "mac, vlan 100-199,300", or "nothing".
func (a Allowance) String() string {
	var out []string
	for _, key := range Keys() {
		if ranges, ok := a[key]; ok {
			out = append(out, strings.TrimSpace(key+" "+text(ranges)))
		}
	}
	if len(out) == 0 {
		return "nothing"
	}
	return strings.Join(out, ", ")
}

func text(ranges []Range) string {
	out := make([]string, len(ranges))
	for i, r := range ranges {
		out[i] = strconv.Itoa(r.From)
		if r.To != r.From {
			out[i] += "-" + strconv.Itoa(r.To)
		}
	}
	return strings.Join(out, ",")
}
