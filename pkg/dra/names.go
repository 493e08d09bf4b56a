// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// DeviceName is the name of a PCI function in ResourceSlices.
func DeviceName(a pci.Address) string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(a.String())
}
