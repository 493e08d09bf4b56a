// SPDX-License-Identifier: Apache-2.0

package hostlocal

// Keys returns an empty configuration, from whose fields plugin.SchemaOf reads the keys.
func Keys() any { return rawConfig{} }
