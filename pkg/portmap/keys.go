// SPDX-License-Identifier: Apache-2.0

package portmap

// Keys returns an empty configuration. From the Go type of this value, the function plugin.SchemaOf gets the keys of the JSON
// configuration.
func Keys() any { return rawConfig{} }
