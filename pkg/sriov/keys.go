// SPDX-License-Identifier: Apache-2.0

package sriov

// Keys returns an empty configuration. The function plugin.SchemaOf reads the keys of the JSON configuration from the type of this value.
func Keys() any { return rawConfig{} }
