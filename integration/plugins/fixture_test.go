// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

type object = harness.Object

// runLife runs ADD and DEL of a plugin, each call edited, and looks for leaked state.
func runLife(t *testing.T, f *harness.Fixture, title, plugin string, edit func(harness.Call) harness.Call) {
	t.Helper()
	f.Life(t, plugin, func() {
		t.Helper()
		edit(f.Good("ADD", plugin)).Run(t).OK(t)
		edit(f.Good("DEL", plugin)).Run(t).OK(t)
	})
	f.Oracle.Clean(t, title)
}

// mustRefuse runs an invalid call, and checks its error and that nothing changed.
func mustRefuse(t *testing.T, f *harness.Fixture, title string, c harness.Call, says string, codes ...int) {
	t.Helper()
	t.Run(title, func(t *testing.T) {
		t.Helper()
		o := c.Run(t)
		if o.Exit == 0 && c.Verb() == "ADD" {
			defer func() {
				c.With("CNI_COMMAND", "DEL").Run(t)
				f.Oracle.Rebase(t)
			}()
		}
		fail := o.Refused(t, codes...)
		if !strings.Contains(fail.Msg, says) {
			t.Errorf("msg %q does not say %q", fail.Msg, says)
		}
		f.Oracle.Clean(t, title)
	})
}
