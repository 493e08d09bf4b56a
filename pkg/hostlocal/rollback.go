// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/store"
)

// IndexPath returns the path of the index for a network and a dataDir. The result ok is true if the index exists.
func IndexPath(network, dataDir string) (path string, ok bool) {
	path = indexPath(leaseDir(network, dataDir))
	_, err := os.Stat(path)
	return path, err == nil
}

// RemoveIndex removes the index and all other files that only this plugin needs. RemoveIndex holds the lock of the lease folder.
// RemoveIndex keeps the leases, because the reference plugin uses them too. The next ADD of this plugin builds a new index.
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
	_ = os.Remove(filepath.Dir(indexPath(leases))) // the folder stays while other networks have an index
	return nil
}

// RemoveFolder removes the index and the lease folder of a network that has no leases. RemoveFolder returns the path of the removed lease
// folder, or "" if the folder still exists.
func RemoveFolder(network, dataDir string) (removed string, err error) {
	path := leaseDir(network, dataDir)
	if found, err := Leases(path); err != nil || len(found) > 0 {
		return "", err
	}
	if err := RemoveIndex(network, dataDir); err != nil {
		return "", err
	}
	dir, err := store.Open(path)
	if err != nil {
		return "", ignoreMissing(err)
	}
	defer dir.Close()
	names, err := dir.List()
	for _, name := range names {
		if name == lockFile || strings.HasPrefix(name, lastPrefix) {
			err = errors.Join(err, dir.Remove(name))
		}
	}
	if err != nil || os.Remove(path) != nil { // the folder stays if it contains a file of another program
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
