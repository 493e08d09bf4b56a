// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestOrphanedFolder: if a mounted folder is removed or moved, the agent ends with an error that names it, so that the next container
// mounts the new one.
func TestOrphanedFolder(t *testing.T) {
	for what, lose := range map[string]func(path string) error{"removed": removeFolder, "moved": func(path string) error { return os.Rename(path, path+".old") }} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			host := l.dir + "/host with space"
			mount := func() {
				kerneltest.Must(t, os.MkdirAll(host, 0o755), unix.Mount(host, l.dir+"/net.d", "", unix.MS_BIND, ""))
			}
			mount()
			t.Cleanup(func() { _ = unix.Unmount(l.dir+"/net.d", unix.MNT_DETACH) })
			done := make(chan error)
			go func() { done <- run(context.Background(), l.options, slog.New(slog.NewTextHandler(l.log, nil))) }()
			l.await("ready", func() bool { return l.status().Ready })
			kerneltest.Must(t, lose(host))
			if err := <-done; err == nil || !strings.Contains(err.Error(), l.dir+"/net.d of the node was removed or moved") {
				t.Fatal(err)
			}
			kerneltest.Must(t, unix.Unmount(l.dir+"/net.d", unix.MNT_DETACH))
			mount()
			l.start()
			l.await("the conflist", func() bool { return l.read("net.d/"+conflistName) == testConflist })
			l.stop()
		})
	}
}

// removeFolder removes a folder with its files. It repeats that, because the agent restores a removed file at once and the folder may be
// full again.
func removeFolder(path string) (err error) {
	for {
		if err = os.RemoveAll(path); !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
	}
}
