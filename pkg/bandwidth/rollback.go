// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
)

// Device returns the device of an attachment by its record, or "" if it has none. shared reports whether the reference plugin uses the same
// name, and so deletes it.
func Device(rec attachment.Record) (name string, shared bool, err error) {
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil {
		return "", false, err
	}
	return st.IFB, rec.IfName == "eth0", nil
}
