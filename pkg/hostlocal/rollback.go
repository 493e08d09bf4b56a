// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/podlace/podlace/pkg/store"
)

// IndexPath returns the path of the index of a network with this dataDir, and reports whether the index exists.
func IndexPath(network, dataDir string) (path string, ok bool) {
	path = indexPath(leaseDir(network, dataDir))
	_, err := os.Stat(path)
	return path, err == nil
}

// RemoveIndex removes this plugin's own files beside the leases of a network, under their lock. It keeps the leases, which the reference
// uses too. The next allocation by this plugin rebuilds the index.
func RemoveIndex(network, dataDir string) error {
	leases := leaseDir(network, dataDir)
	if dir, err := store.Open(leases); err == nil {
		defer dir.Close()
		lock, err := dir.Lock(lockFile, 0o750)
		if err != nil {
			return err
		}
		defer lock.Unlock()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := store.RemoveAll(indexPath(leases)); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(indexPath(leases))) // it stays while other networks have an index
	return nil
}
