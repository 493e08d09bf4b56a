// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"github.com/podlace/podlace/pkg/attachment"
)

// Device returns the name of the ifb device in an attachment's record, or "" if there is none. The second result is true if the reference
// plugin uses the same name. In this case, the reference plugin's DEL deletes the ifb device.
func Device(rec attachment.Record) (name string, shared bool, err error) {
	st, err := attachment.StateOf[state](rec)
	return st.IFB, rec.IfName == "eth0", err
}
