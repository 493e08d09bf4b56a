// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/safchain/ethtool"

	"github.com/podlace/podlace/pkg/pci"
)

// TestFeatures compares Features and SetFeatures of package pci with package ethtool.
func TestFeatures(t *testing.T) {
	const ifname, feature = "ens0f0v0", "tx-tcp-segmentation"
	newLab(t)
	other, err := ethtool.NewEthtool()
	must(t, err)
	defer other.Close()
	same := func() (on []string) {
		t.Helper()
		all, err := other.Features(ifname)
		must(t, err)
		maps.DeleteFunc(all, func(_ string, is bool) bool { return !is })
		on, err = pci.Features(ifname)
		must(t, err)
		if diff := cmp.Diff(slices.Sorted(maps.Keys(all)), on); diff != "" {
			t.Error(diff)
		}
		return on
	}
	before := same()
	if !slices.Contains(before, feature) {
		t.Fatalf("%s is off: %v", feature, before)
	}
	must(t, pci.SetFeatures(ifname, slices.DeleteFunc(slices.Clone(before), func(f string) bool { return f == feature })))
	if after := same(); slices.Contains(after, feature) {
		t.Errorf("%v", after)
	}
	must(t, pci.SetFeatures(ifname, before))
	if diff := cmp.Diff(before, same()); diff != "" {
		t.Error(diff)
	}
	if _, err := pci.Features("none"); err == nil {
		t.Error("an interface that is not there has features")
	}
}
