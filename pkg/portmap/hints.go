// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// withHint says what to do about an error of the kernel layer.
func withHint(err error) error {
	var program *iptables.MissingProgram
	var lost *kernel.Differs
	switch {
	case errors.As(err, &program):
		return plugin.WithHint(err, "install iptables, or use the nftables backend, which needs no program")
	case !errors.As(err, &lost):
		return err
	case lost.Rules:
		return plugin.WithHint(err, "somebody flushed them; 'podlace reload' brings back those of all pods")
	case lost.Set == "owners", lost.Set == "hairpin":
		return plugin.WithHint(err, "'podlace reload' brings it back")
	}
	return err
}
