// SPDX-License-Identifier: Apache-2.0

package bandwidth

// Keys returns an empty struct that mirrors the JSON of the configuration. The function plugin.SchemaOf reads the fields of this struct.
func Keys() any { return rawConfig{} }
