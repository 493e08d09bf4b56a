// SPDX-License-Identifier: Apache-2.0

// Package vfconfig has the settings of one VF, as a conflist, a DeviceClass, a ResourceClaim or an annotation gives them: one type, one
// validation and one merge for all of these. No I/O.
package vfconfig

// Config is what is set of a VF; what is nil or "" stays as it is.
type Config struct {
	Driver string `json:"driver,omitempty"` // to bind the VF to
}
