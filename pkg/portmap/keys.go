// SPDX-License-Identifier: Apache-2.0

package portmap

// Keys returns an empty struct with the keys of the JSON configuration, for plugin.SchemaOf.
func Keys() any { return rawConfig{} }
