// SPDX-License-Identifier: Apache-2.0

// Command floor plays a script of kernel calls from stdin and does nothing else: no parsing of configurations, no
// decisions, no allocation that matters. Its time is the least that a Go process can take for the same effect.
// ../script.go documents the script; ../testdata/floor.c is the same program in C.
package main

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	opNetns = iota + 1
	opEnter
	opSocket
	opSend
	opCreate
	opRemove
	opRead
	opPrint

	netnsFD    = 100 // messages refer to the pod's namespace by this number
	stepHeader = 12
)

// failure names the operation that failed; fmt would cost more than some of the steps.
type failure struct {
	op  uint32
	err error
}

func (f failure) Error() string { return "op " + strconv.Itoa(int(f.op)) + ": " + f.err.Error() }

func align(n int) int { return (n + 3) &^ 3 }

func main() {
	runtime.LockOSThread()
	script, err := slurp(0)
	if err == nil {
		err = play(script)
	}
	if err != nil {
		_, _ = unix.Write(2, []byte(err.Error()+"\n"))
		unix.Exit(1)
	}
}

// slurp reads a descriptor to its end.
func slurp(fd int) ([]byte, error) {
	buf := make([]byte, 0, 16<<10)
	for {
		n, err := unix.Read(fd, buf[len(buf):cap(buf)])
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return buf, nil
		}
		buf = buf[:len(buf)+n]
	}
}

func play(script []byte) error {
	socket := -1
	for len(script) >= stepHeader {
		op := binary.NativeEndian.Uint32(script)
		arg := binary.NativeEndian.Uint32(script[4:])
		size := int(binary.NativeEndian.Uint32(script[8:]))
		data := script[stepHeader : stepHeader+size]
		script = script[stepHeader+align(size):]
		if op == opSocket && socket >= 0 {
			_ = unix.Close(socket)
		}
		fd, err := step(op, arg, data, socket)
		if err != nil {
			return failure{op, err}
		}
		socket = fd
	}
	return nil
}

// step does one operation and gives the socket for the next one.
func step(op, arg uint32, data []byte, socket int) (int, error) {
	var err error
	switch op {
	case opNetns:
		err = openNetns(string(data))
	case opEnter:
		err = unix.Setns(netnsFD, unix.CLONE_NEWNET)
	case opSocket:
		return unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(arg))
	case opSend:
		err = exchange(socket, data, int(arg))
	case opCreate:
		path, content, _ := bytes.Cut(data, []byte{0})
		err = create(string(path), content)
	case opRemove:
		err = unix.Unlink(string(data))
	case opRead:
		err = readFile(string(data))
	case opPrint:
		_, err = unix.Write(1, data)
	default:
		err = unix.ENOSYS
	}
	return socket, err
}

func openNetns(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Dup3(fd, netnsFD, unix.O_CLOEXEC)
}

func create(path string, content []byte) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, content); err != nil {
		return err
	}
	return unix.Close(fd)
}

func readFile(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if _, err := unix.Read(fd, make([]byte, 256)); err != nil {
		return err
	}
	return unix.Close(fd)
}

// exchange sends the messages in one call and reads until as many of them are answered.
func exchange(socket int, messages []byte, answers int) error {
	if err := unix.Sendto(socket, messages, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 32<<10)
	for answers > 0 {
		n, _, err := unix.Recvfrom(socket, buf, 0)
		if err != nil {
			return err
		}
		done, err := count(buf[:n])
		if err != nil {
			return err
		}
		answers -= done
	}
	return nil
}

// count gives the number of final answers in what was received; a refusal is an error.
func count(received []byte) (int, error) {
	answers := 0
	for len(received) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(received))
		kind := binary.NativeEndian.Uint16(received[4:])
		if kind == unix.NLMSG_ERROR || kind == unix.NLMSG_DONE {
			if code := int32(binary.NativeEndian.Uint32(received[unix.NLMSG_HDRLEN:])); code < 0 {
				return 0, unix.Errno(-code)
			}
			answers++
		}
		received = received[min(align(size), len(received)):]
	}
	return answers, nil
}
