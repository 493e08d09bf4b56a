// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/store"
)

// BootFile returns the path of the file in a network's lease folder that only this plugin needs, and whether it exists.
func BootFile(network, dataDir string) (path string, ok bool) {
	path = filepath.Join(LeaseDir(network, dataDir), bootFile)
	_, err := os.Stat(path)
	return path, err == nil
}

// RemoveBootFile removes that file. The leases stay, because the reference plugin uses them too.
func RemoveBootFile(network, dataDir string) error {
	path, _ := BootFile(network, dataDir)
	return ignoreMissing(os.Remove(path))
}

// RemoveFolder removes a network's lease folder if it has no lease and no file of another program. It returns the path of the removed
// folder, or "".
func RemoveFolder(network, dataDir string) (removed string, err error) {
	path := LeaseDir(network, dataDir)
	dir, err := store.Open(path)
	if err != nil {
		return "", ignoreMissing(err)
	}
	defer dir.Close()
	names, err := dir.List()
	foreign := func(name string) bool {
		return name != lockFile && name != bootFile && !strings.HasPrefix(name, lastPrefix)
	}
	if err != nil || slices.ContainsFunc(names, foreign) {
		return "", err
	}
	for _, name := range names {
		err = errors.Join(err, dir.Remove(name))
	}
	if err = errors.Join(err, os.Remove(path)); err != nil {
		return "", err
	}
	return path, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
