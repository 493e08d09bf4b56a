// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// maxSocketPath is how long a path in a socket address may be (unix(7): sun_path is 108 bytes, with a final zero).
const maxSocketPath = 107

// socketName is the file of a resource's endpoint in a folder. It is another one each time: two instances may overlap while one takes
// over from the other, and the kubelet takes a path that it knows for a connection that it has.
func socketName(dir, resource string) string {
	var random [4]byte
	rand.Read(random[:]) // never fails
	return socketPrefix(dir, resource) + hex.EncodeToString(random[:]) + socketSuffix
}

const socketSuffix = ".sock"

// socketPrefix is what the names of all sockets of a resource begin with; eight digits follow. It is a hash where the name has no room.
func socketPrefix(dir, resource string) string {
	name := strings.ReplaceAll(resource, "/", "_")
	if room := maxSocketPath - len(filepath.Join(dir, ".-00000000"+socketSuffix)); len(name) > room {
		sum := sha256.Sum256([]byte(resource))
		name = "podlace-" + hex.EncodeToString(sum[:6])
	}
	return name + "-"
}

// removeStale deletes sockets of a resource that nobody answers any more: those of instances that were killed.
func removeStale(dir, resource string) {
	names, _ := filepath.Glob(filepath.Join(dir, socketPrefix(dir, resource)+"????????"+socketSuffix))
	for _, path := range names {
		conn, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			conn.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			os.Remove(path)
		}
	}
}

// socketID tells a socket from another one at the same path.
type socketID struct {
	dev, inode uint64
	made       int64 // nanoseconds since 1970: numbers of inodes come again
}

// same tells whether it is one socket, for who has it open: its number is not given to another.
func (id socketID) same(other socketID) bool { return id.dev == other.dev && id.inode == other.inode }

// idOf returns the socket at a path; ok is false when there is none.
func idOf(path string) (id socketID, ok bool) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != fs.ModeSocket {
		return socketID{}, false
	}
	return statID(info)
}

func statID(info fs.FileInfo) (id socketID, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return socketID{}, false
	}
	return socketID{st.Dev, st.Ino, st.Ctim.Nano()}, true
}

// listen makes a socket that only root reaches. Its file appears when it can be connected to, under a name that begins with a dot before,
// which the kubelet leaves alone; it stays when the listener is closed.
func listen(path string) (*net.UnixListener, error) {
	hidden := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if len(hidden) > maxSocketPath {
		return nil, fmt.Errorf("socket %s: its path is too long, want at most %d bytes", path, maxSocketPath-1)
	}
	if err := os.Remove(hidden); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(hidden, 0o600)
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a socket: %w", err), l.Close(), os.Remove(hidden))
	}
	return l, nil
}
