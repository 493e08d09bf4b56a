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

// MaxSocketPath is the maximum length of a socket's path. According to unix(7), the field sun_path has 108 bytes, including a terminating
// zero.
const MaxSocketPath = 107

// lookEvery is the time between two checks of the socket file. These checks are necessary because another program may remove the socket
// file.
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

// Same reports whether two IDs belong to the same socket. The result of Same is valid only while the caller has the socket open. After the
// socket is closed, the kernel may reuse its inode number for another socket.
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

// replaceSocket creates a socket and its folder. If another instance of the program has a socket at this path, replaceSocket replaces it.
// After the replacement, this instance of the program receives the requests. replaceSocket does not replace a file that is not a socket.
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

// ServeSocket serves a socket until ctx is done. The caller can use the WaitGroup in the argument "running" to wait for the end of the
// goroutines that ServeSocket starts. If another program removes the socket, ServeSocket creates the socket again. ServeSocket also creates
// the socket again if another instance replaced it and then ended.
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

// awaitLost waits until no process serves the path. awaitLost then creates the socket again and returns the new listener. When ctx is done,
// awaitLost removes the socket and returns nil.
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

// Listen creates a unix socket that only root can use. The socket file gets its final path only when the socket accepts connections. Until
// the socket accepts connections, its file has a temporary name with a leading dot. The kubelet ignores files with a leading dot. When the
// listener is closed, the socket file stays.
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
