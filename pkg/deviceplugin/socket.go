// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
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
	return socketPrefix(dir, resource) + randomHex() + socketSuffix
}

// randomHex returns eight hexadecimal digits.
func randomHex() string {
	var random [4]byte
	rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

const socketSuffix = ".sock"

// socketPrefix is what the names of all sockets of a resource begin with; eight digits follow. It is a hash where the name has no room.
func socketPrefix(dir, resource string) string {
	name := strings.ReplaceAll(resource, "/", "_")
	if room := maxSocketPath - len(filepath.Join(dir, "-00000000"+socketSuffix)); len(name) > room {
		sum := sha256.Sum256([]byte(resource))
		name = "podlace-" + hex.EncodeToString(sum[:6])
	}
	return name + "-"
}

// removeStale deletes sockets of a resource that nobody answers any more: those of instances that were killed.
func removeStale(dir, resource string) {
	names, _ := filepath.Glob(filepath.Join(dir, socketPrefix(dir, resource)+"????????"+socketSuffix))
	for _, path := range names {
		if !answered(path) {
			os.Remove(path)
		}
	}
}

// socketID tells a socket from another one at the same path.
type socketID struct {
	dev, inode uint64
	made       int64 // nanoseconds since 1970: numbers of inodes come again
}

// same reports whether it is one socket, for who has it open: its number is not given to another.
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

// replace makes a socket, and its folder, where another instance may have one: from now on it is this one that is asked. Anything but a
// socket stays.
func replace(path string) (*net.UnixListener, socketID, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, socketID{}, err
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, socketID{}, err
	case info.Mode().Type() != fs.ModeSocket:
		return nil, socketID{}, fmt.Errorf("socket %s: something else is there", path)
	}
	return listen(path)
}

// answerAt has a socket served until ctx is done. One that was removed, or that another instance took and left, is made again.
func (d *daemon) answerAt(ctx context.Context, path string, serve func(context.Context, *net.UnixListener)) error {
	l, own, err := replace(path)
	if err != nil {
		return err
	}
	d.running.Go(func() {
		for l != nil {
			current, stop := context.WithCancel(ctx)
			go serve(current, l)
			l, own = d.awaitLost(ctx, path, own)
			stop()
		}
	})
	return nil
}

// awaitLost returns the next socket when nobody answers at path any more, nil when ctx is done; then the socket is removed.
func (d *daemon) awaitLost(ctx context.Context, path string, own socketID) (*net.UnixListener, socketID) {
	told := ""
	for {
		select {
		case <-ctx.Done():
			if id, ok := idOf(path); ok && id.same(own) {
				os.Remove(path)
			}
			return nil, socketID{}
		case <-time.After(lookEvery):
		}
		id, ok := idOf(path)
		if ok && (id.same(own) || answered(path)) {
			continue
		}
		l, id, err := replace(path)
		if err == nil {
			d.log.Info("a socket that was lost is there again", "socket", path)
			return l, id
		}
		if err.Error() != told {
			d.log.Warn("a socket is lost", "error", err)
		}
		told = err.Error()
	}
}

// answered reports whether somebody listens.
func answered(path string) bool {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return !errors.Is(err, syscall.ECONNREFUSED)
	}
	conn.Close()
	return true
}

// listen makes a socket that only root reaches. Its file appears when it can be connected to, under a name of its own that begins with a
// dot before, which the kubelet leaves alone; it stays when the listener is closed.
func listen(path string) (*net.UnixListener, socketID, error) {
	hidden := filepath.Join(filepath.Dir(path), "."+randomHex())
	if most := max(len(path), len(hidden)); most > maxSocketPath {
		return nil, socketID{}, fmt.Errorf("socket %s: its path is too long, want at most %d bytes", path, maxSocketPath-most+len(path))
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, socketID{}, fmt.Errorf("make a socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(hidden, 0o600)
	own, _ := idOf(hidden)
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		return nil, socketID{}, errors.Join(fmt.Errorf("make a socket: %w", err), l.Close(), os.Remove(hidden))
	}
	return l, own, nil
}
