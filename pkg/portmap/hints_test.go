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
		{fmt.Errorf("x: %w", &iptables.MissingProgram{Name: "iptables-save"}), plugin.CodeKernelFeature,
			"install iptables, or use the nftables backend, which needs no program"},
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
