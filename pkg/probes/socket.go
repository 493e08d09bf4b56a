// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// MaxSocketPath is how long a path in a socket address may be (unix(7): sun_path is 108 bytes, with a final zero).
const MaxSocketPath = 107

// lookEvery is how often a served socket is looked at: another program may remove its file.
const lookEvery = time.Second

// RandomHex returns eight hexadecimal digits.
func RandomHex() string {
	var random [4]byte
	rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

// SocketID tells a socket from another one at the same path.
type SocketID struct {
	dev, inode uint64
	made       int64 // nanoseconds since 1970: numbers of inodes come again
}

// Same reports whether it is one socket, for who has it open: its number is not given to another.
func (id SocketID) Same(other SocketID) bool { return id.dev == other.dev && id.inode == other.inode }

// SocketAt returns the socket at a path; ok is false when there is none.
func SocketAt(path string) (id SocketID, ok bool) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != fs.ModeSocket {
		return SocketID{}, false
	}
	return statSocket(info)
}

func statSocket(info fs.FileInfo) (id SocketID, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return SocketID{}, false
	}
	return SocketID{st.Dev, st.Ino, st.Ctim.Nano()}, true
}

// replaceSocket makes a socket, and its folder, where another instance may have one: from now on it is this one that is asked. Anything but
// a socket stays.
func replaceSocket(path string) (*net.UnixListener, SocketID, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, SocketID{}, err
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, SocketID{}, err
	case info.Mode().Type() != fs.ModeSocket:
		return nil, SocketID{}, fmt.Errorf("socket %s: something else is there", path)
	}
	return Listen(path)
}

// ServeSocket has a socket served until ctx is done, in goroutines that running waits for. One that was removed, or that another instance
// took and left, is made again.
func ServeSocket(ctx context.Context, path string, log *slog.Logger, running *sync.WaitGroup,
	serve func(context.Context, *net.UnixListener)) error {
	l, own, err := replaceSocket(path)
	if err != nil {
		return err
	}
	running.Go(func() {
		for l != nil {
			current, stop := context.WithCancel(ctx)
			go serve(current, l)
			l, own = awaitLost(ctx, path, own, log)
			stop()
		}
	})
	return nil
}

// awaitLost returns the next socket when nobody answers at path any more, nil when ctx is done; then the socket is removed.
func awaitLost(ctx context.Context, path string, own SocketID, log *slog.Logger) (*net.UnixListener, SocketID) {
	told := ""
	for {
		select {
		case <-ctx.Done():
			if id, ok := SocketAt(path); ok && id.Same(own) {
				os.Remove(path)
			}
			return nil, SocketID{}
		case <-time.After(lookEvery):
		}
		id, ok := SocketAt(path)
		if ok && (id.Same(own) || Answered(path)) {
			continue
		}
		l, id, err := replaceSocket(path)
		if err == nil {
			log.Info("a socket that was lost is there again", "socket", path)
			return l, id
		}
		if err.Error() != told {
			log.Warn("a socket is lost", "error", err)
		}
		told = err.Error()
	}
}

// Answered reports whether somebody listens.
func Answered(path string) bool {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return !errors.Is(err, syscall.ECONNREFUSED)
	}
	conn.Close()
	return true
}

// Listen makes a socket that only root reaches. Its file appears when it can be connected to, under a name of its own that begins with a
// dot before, which the kubelet leaves alone; it stays when the listener is closed.
func Listen(path string) (*net.UnixListener, SocketID, error) {
	hidden := filepath.Join(filepath.Dir(path), "."+RandomHex())
	if most := max(len(path), len(hidden)); most > MaxSocketPath {
		return nil, SocketID{}, fmt.Errorf("socket %s: its path is too long, want at most %d bytes", path, MaxSocketPath-most+len(path))
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, SocketID{}, fmt.Errorf("make a socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(hidden, 0o600)
	own, _ := SocketAt(hidden)
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		return nil, SocketID{}, errors.Join(fmt.Errorf("make a socket: %w", err), l.Close(), os.Remove(hidden))
	}
	return l, own, nil
}
