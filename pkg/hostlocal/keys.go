// SPDX-License-Identifier: Apache-2.0

package hostlocal

// Keys returns an empty struct that mirrors the JSON of the configuration, for plugin.SchemaOf.
func Keys() any { return rawConfig{} }
