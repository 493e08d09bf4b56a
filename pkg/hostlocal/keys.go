// SPDX-License-Identifier: Apache-2.0

package hostlocal

// Keys returns an empty struct with one field for each key of the configuration. The function plugin.SchemaOf reads the fields of this
// struct.
func Keys() any { return rawConfig{} }
