// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Operations of a floor script. Each step is op, arg and length (uint32, native order), then the data, padded to
// four bytes.
const (
	opNetns  = iota + 1 // data: path of a network namespace, opened as descriptor 100
	opEnter             // enter that namespace
	opSocket            // arg: netlink protocol; replaces the socket before
	opSend              // data: messages, sent at once; arg: how many answers to wait for
	opCreate            // data: path, NUL, content; the file must not exist
	opRemove            // data: path
	opRead              // data: path
	opPrint             // data: what goes to stdout

	netnsFD = 100
)

// script is what one floor process does.
type script []byte

func (s *script) step(op, arg uint32, data []byte) {
	out := binary.NativeEndian.AppendUint32(*s, op)
	out = binary.NativeEndian.AppendUint32(out, arg)
	out = binary.NativeEndian.AppendUint32(out, uint32(len(data)))
	*s = pad(append(out, data...))
}

// send adds messages that all go out in one call, and waits for one answer to each.
func (s *script) send(messages ...*message) {
	s.batch(len(messages), messages...)
}

// batch is send where not every message is answered.
func (s *script) batch(answers int, messages ...*message) {
	var data []byte
	for i, m := range messages {
		data = append(data, m.encode(uint32(i+1))...)
	}
	s.step(opSend, uint32(answers), data)
}

func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// message is a netlink message under construction.
type message struct {
	kind, flags uint16
	body        []byte
}

func newMessage(kind, flags uint16, header []byte) *message {
	return &message{kind: kind, flags: flags | unix.NLM_F_REQUEST, body: pad(header)}
}

func (m *message) encode(sequence uint32) []byte {
	out := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(m.body)))
	out = binary.NativeEndian.AppendUint16(out, m.kind)
	out = binary.NativeEndian.AppendUint16(out, m.flags)
	out = binary.NativeEndian.AppendUint32(out, sequence)
	out = binary.NativeEndian.AppendUint32(out, 0)
	return append(out, m.body...)
}

func (m *message) attr(kind uint16, data []byte) *message {
	m.body = append(m.body, attr(kind, data)...)
	return m
}

// nest adds an attribute that holds others.
func (m *message) nest(kind uint16, attrs ...[]byte) *message {
	m.body = append(m.body, nest(kind, attrs...)...)
	return m
}

func attr(kind uint16, data []byte) []byte {
	out := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofNlAttr+len(data)))
	out = binary.NativeEndian.AppendUint16(out, kind)
	return pad(append(out, data...))
}

func nest(kind uint16, attrs ...[]byte) []byte {
	var data []byte
	for _, a := range attrs {
		data = append(data, a...)
	}
	return attr(kind|unix.NLA_F_NESTED, data)
}

func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
func big32(v uint32) []byte    { return binary.BigEndian.AppendUint32(nil, v) }
func big16(v uint16) []byte    { return binary.BigEndian.AppendUint16(nil, v) }
func text(s string) []byte     { return append([]byte(s), 0) }
