// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/safchain/ethtool"

	"github.com/podlace/podlace/pkg/fault"
)

// Features returns the features of an interface that are on, sorted, in the words of ethtool -k; none where the kernel tells of none.
func Features(ifname string) (on []string, err error) {
	err = withEthtool(func(e *ethtool.Ethtool) error {
		all, err := e.Features(ifname)
		if errors.Is(err, syscall.EOPNOTSUPP) {
			return nil
		}
		for name, is := range all {
			if is {
				on = append(on, name)
			}
		}
		return err
	})
	slices.Sort(on)
	if err != nil {
		return nil, fmt.Errorf("features of %s: %w", ifname, err)
	}
	return on, nil
}

// SetFeatures switches these features of an interface on and all others off. Those that the driver does not let be switched stay as they
// are, which is no error.
func SetFeatures(ifname string, on []string) error {
	return withEthtool(func(e *ethtool.Ethtool) error {
		all, err := e.Features(ifname)
		if err != nil {
			return fmt.Errorf("features of %s: %w", ifname, err)
		}
		maps.DeleteFunc(all, func(name string, is bool) bool { return is == slices.Contains(on, name) })
		words := []string{}
		for _, name := range slices.Sorted(maps.Keys(all)) {
			all[name] = !all[name]
			words = append(words, fmt.Sprintf(" %s %s", name, map[bool]string{true: "on", false: "off"}[all[name]]))
		}
		if len(all) == 0 {
			return nil
		}
		op := "ethtool -K " + ifname + strings.Join(words, "")
		if err = fault.Point(op); err == nil {
			err = e.Change(ifname, all)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		return nil
	})
}

func withEthtool(f func(*ethtool.Ethtool) error) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return fmt.Errorf("open socket for ethtool: %w", err)
	}
	defer e.Close()
	return f(e)
}
