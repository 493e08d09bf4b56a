// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"github.com/podlace/podlace/pkg/attachment"
)

// Device returns the name of the ifb device in an attachment's record, or "". shared is true if the reference plugin uses the same name, so
// that its DEL deletes the device.
func Device(rec attachment.Record) (name string, shared bool, err error) {
	st, err := attachment.StateOf[state](rec)
	return st.IFB, rec.IfName == "eth0", err
}
