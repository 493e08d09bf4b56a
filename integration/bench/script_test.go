// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMessage(t *testing.T) {
	got := newMessage(3, unix.NLM_F_ACK, []byte{1, 2}).attr(7, []byte("ab")).nest(8, attr(9, nil)).encode(5)
	pair := func(a, b uint16) []byte {
		return binary.NativeEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, a), b)
	}
	want := bytes.Join([][]byte{
		native32(36), pair(3, unix.NLM_F_REQUEST|unix.NLM_F_ACK), native32(5), native32(0),
		{1, 2, 0, 0},
		pair(6, 7), {'a', 'b', 0, 0},
		pair(8, 8|unix.NLA_F_NESTED), pair(4, 9),
	}, nil)
	if !bytes.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// TestFloor plays the same scripts with both flavours of the floor program.
func TestFloor(t *testing.T) {
	var f folders
	for _, reason := range f.buildFloors(t.TempDir()) {
		t.Log("skipped:", reason)
	}
	if f.floorGo == "" {
		t.Fatal("the Go floor was not built")
	}
	for name, program := range map[string]string{"Go": f.floorGo, "C": f.floorC} {
		t.Run(name, func(t *testing.T) {
			if program == "" {
				t.Skip("not built: no C compiler with a static libc")
			}
			testFiles(t, program)
			testNetlink(t, program)
		})
	}
}

func testFiles(t *testing.T, program string) {
	path := filepath.Join(t.TempDir(), "10.0.0.2")
	var create, remove script
	create.step(opCreate, 0, append(text(path), "id\r\neth0"...))
	create.step(opRead, 0, []byte(path))
	create.step(opPrint, 0, []byte("done"))
	remove.step(opRemove, 0, []byte(path))

	out, err := execute(invocation{path: program, stdin: create})
	if err != nil || string(out) != "done" {
		t.Fatalf("create: %q, %v", out, err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "id\r\neth0" {
		t.Errorf("content %q, %v", content, err)
	}
	if _, err := execute(invocation{path: program, stdin: create}); err == nil {
		t.Error("a file that exists was created again")
	}
	if _, err := execute(invocation{path: program, stdin: remove}); err != nil {
		t.Errorf("remove: %v", err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
}

func testNetlink(t *testing.T, program string) {
	const loopback, nobody = 1, 1 << 30
	link := func(index uint32) *message {
		return newMessage(unix.RTM_GETLINK, unix.NLM_F_ACK, linkHeader(index, false))
	}
	var good, bad script
	good.step(opSocket, unix.NETLINK_ROUTE, nil)
	good.send(link(loopback), link(loopback))
	good.send(newMessage(unix.RTM_GETADDR, unix.NLM_F_DUMP, addressHeader(0, 0)))
	bad.step(opSocket, unix.NETLINK_ROUTE, nil)
	bad.send(link(nobody))
	if _, err := execute(invocation{path: program, stdin: good}); err != nil {
		t.Errorf("look at lo: %v", err)
	}
	if _, err := execute(invocation{path: program, stdin: bad}); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("an unknown link: %v, want exit status 1", err)
	}
}
