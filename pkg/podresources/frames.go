// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
)

// Frame types and flags of HTTP/2 (RFC 9113, section 6).
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	frameReset        = 0x3
	frameSettings     = 0x4
	framePush         = 0x5
	framePing         = 0x6
	frameGoAway       = 0x7
	frameWindowUpdate = 0x8
	frameContinuation = 0x9

	flagAck        = 0x1 // in SETTINGS and PING
	flagEndStream  = 0x1 // in DATA and HEADERS
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20
)

// maxFrame is the maximum payload of a frame in bytes. The value of maxFrame is the default, because the client announces no other limit
// (section 4.2).
const maxFrame = 16384

// The type frame is one HTTP/2 frame. The payload of a frame is valid only until the next frame is read.
type frame struct {
	kind, flags byte
	stream      uint32
	payload     []byte
}

// frameReader reads HTTP/2 frames (section 4.1).
type frameReader struct {
	from   io.Reader
	left   int // bytes that may still be read
	buffer []byte
}

func newFrames(from io.Reader, limit int) *frameReader {
	return &frameReader{bufio.NewReaderSize(from, 2*maxFrame), limit, make([]byte, maxFrame)}
}

func (r *frameReader) next() (f frame, err error) {
	var head [9]byte
	if _, err := io.ReadFull(r.from, head[:]); err != nil {
		return f, err
	}
	length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	if length > maxFrame {
		return f, fmt.Errorf("a frame has %d bytes: want at most %d; the socket may not be the kubelet's", length, maxFrame)
	}
	if r.left -= len(head) + length; r.left < 0 {
		return f, fmt.Errorf("the frames exceed the limit: want a response of at most %d bytes", maxResponse)
	}
	f = frame{head[3], head[4], binary.BigEndian.Uint32(head[5:]) &^ (1 << 31), r.buffer[:length]}
	_, err = io.ReadFull(r.from, f.payload)
	return f, err
}

// unpaddedPayload returns the payload of a DATA or HEADERS frame without the padding and without the priority (sections 6.1 and 6.2).
func (f frame) unpaddedPayload() ([]byte, error) {
	head, tail := 0, 0
	if f.flags&flagPadded != 0 && len(f.payload) > 0 {
		head, tail = 1, int(f.payload[0])
	} else if f.flags&flagPadded != 0 {
		tail = 1
	}
	if f.kind == frameHeaders && f.flags&flagPriority != 0 {
		head += 5
	}
	if head+tail > len(f.payload) {
		return nil, fmt.Errorf("a frame of %d bytes has %d bytes of padding", len(f.payload), tail)
	}
	return f.payload[head : len(f.payload)-tail], nil
}

// onStream reports whether frames of this type belong to a stream. Frames of other types belong to the whole connection. The client uses
// only the stream with the number 1.
func (f frame) onStream() bool {
	switch f.kind {
	case frameData, frameHeaders, frameReset, framePush, frameContinuation:
		return true
	}
	return false
}

func appendFrame(b []byte, kind, flags byte, stream uint32, payload []byte) []byte {
	b = append(b, byte(len(payload)>>16), byte(len(payload)>>8), byte(len(payload)), kind, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}
