// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// withHint says what to do about an error of the kernel layer.
func withHint(err error) error {
	var program *iptables.MissingProgram
	if errors.As(err, &program) {
		return plugin.WithHint(err, "install iptables, or use the nftables backend, which needs no program")
	}
	return err
}
