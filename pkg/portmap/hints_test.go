// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"fmt"
	"testing"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestHints(t *testing.T) {
	for _, c := range []struct {
		err  error
		code uint
		hint string
	}{
		{&iptables.MissingProgram{Name: "iptables-save"}, plugin.CodeKernelFeature, "install iptables, or use the nftables backend, which needs no program"},
		{fmt.Errorf("x: %w", &kernel.Differs{Rules: true}), plugin.CodeStateDiffers, "somebody flushed them; 'podlace reload' brings back those of all pods"},
		{&kernel.Differs{Set: "owners"}, plugin.CodeStateDiffers, "'podlace reload' brings it back"},
		{&kernel.Differs{Set: "hairpin"}, plugin.CodeStateDiffers, "'podlace reload' brings it back"},
		{&kernel.Differs{Set: "ports4"}, plugin.CodeStateDiffers, ""}, // another pod may have the port
		{&kernel.MissingFeature{What: "x", Err: errors.New("y")}, plugin.CodeKernelFeature, ""},
		{errors.New("x"), plugin.CodeIO, ""},
	} {
		err := withHint(c.err)
		if plugin.Code(err) != c.code || plugin.Hint(err) != c.hint || err.Error() != c.err.Error() || !errors.Is(err, c.err) {
			t.Errorf("%v: code %d, hint %q", err, plugin.Code(err), plugin.Hint(err))
		}
	}
	if err := withHint(nil); err != nil {
		t.Errorf("got %v", err)
	}
}
