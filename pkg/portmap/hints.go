// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// withHint adds a hint to an error about a missing program.
func withHint(err error) error {
	var program *iptables.MissingProgram
	if errors.As(err, &program) {
		return plugin.WithHint(err, "install iptables, or use the nftables backend, which needs no program")
	}
	return err
}
