// SPDX-License-Identifier: Apache-2.0

package bridge

// Keys returns an empty struct that mirrors the JSON of the configuration. plugin.SchemaOf computes the JSON Schema of the plugin from the
// fields of this struct.
func Keys() any { return rawConfig{} }
