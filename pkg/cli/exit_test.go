// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
)

// TestExitOf: an error that is only an exit status must not hide another's message.
func TestExitOf(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		stderr string
	}{
		{nil, exitOK, ""},
		{exitError(exitDiffers), exitDiffers, ""},
		{errors.New("no disk"), exitFailed, "podlace: no disk\n"},
		{errors.Join(exitError(exitFailed), exitError(exitDiffers)), exitFailed, ""},
		{errors.Join(exitError(exitFailed), fmt.Errorf("read: %w", errors.New("no disk"))), exitFailed, "podlace: read: no disk\n"},
		{errors.Join(errors.New("no disk"), errors.New("no disk"), errors.New("no net")), exitFailed, "podlace: no disk; no net\n"},
		{errors.Join(errors.New("no disk"), errors.Join(nil, exitError(exitDiffers))), exitDiffers, "podlace: no disk\n"},
	} {
		var stderr bytes.Buffer
		if status := exitOf(&stderr, Command(), c.err); status != c.status || stderr.String() != c.stderr {
			t.Errorf("%v: status %d, %q", c.err, status, stderr.String())
		}
	}
}
