// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// Restore restores the ports of a pod whose namespace a container with few of the node's files does not see.
func TestHiddenNamespace(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	folder := filepath.Dir(l.Pod.Path)
	kerneltest.Must(t, os.Rename(folder, folder+"-hidden"), kerneltest.FlushNFT())
	err := Restore(openHost(t), slog.New(slog.DiscardHandler))
	kerneltest.Must(t, os.Rename(folder+"-hidden", folder), err)
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
}
