// SPDX-License-Identifier: Apache-2.0

package bandwidth

// Keys returns an empty struct that mirrors the JSON of the configuration. The function plugin.SchemaOf derives the JSON schema of the
// configuration from this struct.
func Keys() any { return rawConfig{} }
