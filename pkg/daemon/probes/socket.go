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

// MaxSocketPath is the maximum length of a socket's path: sun_path has 108 bytes with a terminating zero (unix(7)).
const MaxSocketPath = 107

// lookEvery is how often the socket file is checked, because another program may remove it.
const lookEvery = time.Second

// RandomHex returns eight random hexadecimal digits.
func RandomHex() string {
	var random [4]byte
	rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
}

// SocketID distinguishes a socket from a later socket at the same path.
type SocketID struct {
	dev, inode uint64
	made       int64 // nanoseconds since 1970, because inode numbers are reused
}

// Same reports whether two IDs belong to the same socket. It is valid only while the caller has the socket open, because the kernel may
// reuse the inode number afterwards.
func (id SocketID) Same(other SocketID) bool { return id.dev == other.dev && id.inode == other.inode }

// SocketAt returns the ID of the socket at a path. If there is no socket at this path, the second result of SocketAt is false.
func SocketAt(path string) (id SocketID, ok bool) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != fs.ModeSocket {
		return SocketID{}, false
	}
	st := info.Sys().(*syscall.Stat_t)
	return SocketID{st.Dev, st.Ino, st.Ctim.Nano()}, true
}

// replaceSocket creates a socket and its folder. It replaces the socket of another instance, whose requests then come here, but not a
// file that is no socket.
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

// ServeSocket serves a socket until ctx is done; `running` waits for its goroutines. It creates the socket again if another program
// removes it, or if another instance replaced it and then ended.
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

// awaitLost waits until no process serves the path, creates the socket again and returns the new listener. When ctx is done, it removes
// the socket and returns nil.
func awaitLost(ctx context.Context, path string, own SocketID, log *slog.Logger) (*net.UnixListener, SocketID) {
	lastError := ""
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
			log.Info("recreated a lost socket", "socket", path)
			return l, id
		}
		if err.Error() != lastError {
			log.Warn("could not recreate a lost socket", "error", err)
		}
		lastError = err.Error()
	}
}

// Answered reports whether a process listens on the socket at path.
func Answered(path string) bool {
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return !errors.Is(err, syscall.ECONNREFUSED)
	}
	conn.Close()
	return true
}

// RemoveStale deletes the sockets that match a pattern and that no process serves, such as those of killed instances.
func RemoveStale(pattern string) {
	paths, _ := filepath.Glob(pattern)
	for _, path := range paths {
		if !Answered(path) {
			os.Remove(path)
		}
	}
}

// Listen creates a unix socket for root only. Until it accepts connections, its file has a temporary name with a leading dot, which the
// kubelet ignores. The file stays when the listener is closed.
func Listen(path string) (*net.UnixListener, SocketID, error) {
	hidden := filepath.Join(filepath.Dir(path), "."+RandomHex())
	if most := max(len(path), len(hidden)); most > MaxSocketPath {
		return nil, SocketID{}, fmt.Errorf("socket %s: its path is too long, want at most %d bytes", path, MaxSocketPath-most+len(path))
	}
	listener, err := (&net.ListenConfig{Control: ownerOnly}).Listen(context.Background(), "unix", hidden)
	if err != nil {
		return nil, SocketID{}, fmt.Errorf("make a socket: %w", err)
	}
	l := listener.(*net.UnixListener)
	l.SetUnlinkOnClose(false)
	own, _ := SocketAt(hidden)
	if err := os.Rename(hidden, path); err != nil {
		return nil, SocketID{}, errors.Join(fmt.Errorf("make a socket: %w", err), l.Close(), os.Remove(hidden))
	}
	return l, own, nil
}

// ownerOnly sets the mode of a socket before bind() creates its file with this mode, so that no other user can ever connect.
func ownerOnly(_, _ string, conn syscall.RawConn) (err error) {
	return errors.Join(conn.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) }), err)
}
