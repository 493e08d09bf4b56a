// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2/hpack"
)

const (
	// maxResponse is the maximum size of a response message in bytes. The constant maxHeaders is the maximum size in bytes of the headers,
	// and of the trailers. The constant maxBytes is the maximum number of bytes that the client reads in total, including framing and
	// padding.
	maxResponse = 64 << 20
	maxHeaders  = 1 << 20
	maxBytes    = 2 * maxResponse
	// maxWindow is the maximum flow-control window (RFC 9113, section 6.9.1). maxWindow is larger than maxBytes. The client therefore never
	// needs to enlarge the flow-control window.
	maxWindow, defaultWindow = 1<<31 - 1, 1<<16 - 1
)

// sendCall sends a request to the gRPC server at a unix socket. sendCall returns the response message. Each call of sendCall opens a new
// connection. The format of requests and responses is described in "Requests" and "Responses" of
// github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
func sendCall(ctx context.Context, socket, method string, request []byte) ([]byte, error) {
	data, err := encodeRequest(method, request)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(data); err != nil {
		return nil, err
	}
	return newExchange(conn).run()
}

// encodeRequest returns the bytes of a complete request: the preface, the settings and the message. One write can send the whole request,
// because a client need not wait for the settings of the server (section 3.4).
func encodeRequest(method string, request []byte) ([]byte, error) {
	if len(request) > 4096 {
		return nil, fmt.Errorf("the request has %d bytes: want at most 4096", len(request))
	}
	var headers bytes.Buffer
	to := hpack.NewEncoder(&headers)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "localhost"},
		{"content-type", "application/grpc"}, {"te", "trailers"}, {"user-agent", "podlace"}} {
		_ = to.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}) // a write to a bytes.Buffer never fails
	}
	settings := []byte{0, 2, 0, 0, 0, 0} // SETTINGS_ENABLE_PUSH 0, SETTINGS_INITIAL_WINDOW_SIZE, SETTINGS_MAX_HEADER_LIST_SIZE (section 6.5.2)
	settings = binary.BigEndian.AppendUint32(append(settings, 0, 4), maxWindow)
	settings = binary.BigEndian.AppendUint32(append(settings, 0, 6), maxHeaders)
	message := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(request))), request...) // "Length-Prefixed-Message", not compressed

	b := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	b = appendFrame(b, frameSettings, 0, 0, settings)
	b = appendFrame(b, frameWindowUpdate, 0, 0, binary.BigEndian.AppendUint32(nil, maxWindow-defaultWindow))
	b = appendFrame(b, frameHeaders, flagEndHeaders, 1, headers.Bytes())
	return appendFrame(b, frameData, flagEndStream, 1, message), nil
}

// The type frameExchange collects the frames of one response.
type frameExchange struct {
	to      io.Writer
	frames  *frameReader
	decoder *hpack.Decoder
	size    int // bytes of all headers and trailers

	greeted, ended             bool
	http, kind, status, detail string // values of the headers that answer checks
	body                       []byte
}

func newExchange(conn io.ReadWriter) *frameExchange {
	x := &frameExchange{to: conn, frames: newFrames(conn, maxBytes)}
	x.decoder = hpack.NewDecoder(4096, x.header) // the default table size, because we announce no other (RFC 7541; RFC 9113, section 6.5.2)
	x.decoder.SetMaxStringLength(maxHeaders)
	return x
}

func (x *frameExchange) run() ([]byte, error) {
	for !x.ended {
		f, err := x.frames.next()
		if err == nil {
			err = x.handle(f)
		}
		if err != nil {
			return nil, err
		}
	}
	return x.finalMessage()
}

// handle() processes one frame. handle() ignores frames of the types WINDOW_UPDATE and PRIORITY, and frames of unknown types (section 5.5).
func (x *frameExchange) handle(f frame) error {
	if !x.greeted && (f.kind != frameSettings || f.flags&flagAck != 0) {
		return fmt.Errorf("the first frame has type %d: want SETTINGS; the socket may not be the kubelet's", f.kind)
	}
	x.greeted = true
	switch {
	case f.onStream() && f.stream != 1:
		return fmt.Errorf("a frame of type %d belongs to stream %d, which is not open", f.kind, f.stream)
	case f.kind == frameData:
		return x.data(f)
	case f.kind == frameHeaders:
		return x.readHeaders(f)
	case f.kind == frameReset:
		return resetError(f)
	case f.kind == framePush || f.kind == frameContinuation:
		return fmt.Errorf("unexpected frame of type %d", f.kind)
	case f.kind == frameGoAway:
		return checkGoAway(f)
	case f.flags&flagAck != 0:
	case f.kind == frameSettings:
		x.reply(frameSettings, nil)
	case f.kind == framePing:
		x.reply(framePing, f.payload)
	}
	return nil
}

// reply() acknowledges a frame. reply() ignores write errors, because a server that has closed its side of the connection may already have
// sent the complete response.
func (x *frameExchange) reply(kind byte, payload []byte) {
	_, _ = x.to.Write(appendFrame(nil, kind, flagAck, 0, payload))
}

func (x *frameExchange) data(f frame) error {
	part, err := f.unpaddedPayload()
	if err != nil {
		return err
	}
	if len(x.body)+len(part) > maxResponse {
		return fmt.Errorf("the answer is too long: want at most %d bytes", maxResponse)
	}
	x.body = append(x.body, part...)
	x.ended = f.flags&flagEndStream != 0
	return nil
}

// readHeaders decodes headers or trailers. CONTINUATION frames may contain the rest of the headers or trailers (section 4.3).
func (x *frameExchange) readHeaders(f frame) error {
	block, err := f.unpaddedPayload()
	if err != nil {
		return err
	}
	x.ended = f.flags&flagEndStream != 0
	for {
		if _, err := x.decoder.Write(block); err != nil {
			return fmt.Errorf("headers: %w", err)
		}
		if x.size > maxHeaders {
			return fmt.Errorf("headers of more than %d bytes", maxHeaders)
		}
		if f.flags&flagEndHeaders != 0 {
			return x.decoder.Close()
		}
		if f, err = x.frames.next(); err != nil {
			return err
		}
		if f.kind != frameContinuation || f.stream != 1 {
			return errors.New("the headers are incomplete: want a CONTINUATION frame")
		}
		block = f.payload
	}
}

func (x *frameExchange) header(h hpack.HeaderField) {
	if x.size += int(h.Size()); x.size > maxHeaders {
		x.decoder.SetEmitEnabled(false)
		return
	}
	switch h.Name {
	case ":status":
		x.http = h.Value
	case "content-type":
		x.kind = h.Value
	case "grpc-status":
		x.status = h.Value
	case "grpc-message":
		x.detail = h.Value
	}
}

// finalMessage returns the message of a complete response, or the error that the server sent.
func (x *frameExchange) finalMessage() ([]byte, error) {
	code, err := strconv.ParseUint(x.status, 10, 31)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the response is not gRPC: HTTP status %q, content-type %q, grpc-status %q", x.http, x.kind, x.status)
	case code != 0:
		return nil, &statusError{int(code), unescape(x.detail)}
	case len(x.body) < 5 || x.body[0] != 0 || int(binary.BigEndian.Uint32(x.body[1:])) != len(x.body)-5:
		return nil, fmt.Errorf("the response has %d bytes and begins with %x: want one uncompressed message", len(x.body),
			x.body[:min(5, len(x.body))])
	}
	return x.body[5:], nil
}

// resetError converts an RST_STREAM frame (section 6.4) to a gRPC error. The section "Errors" of the gRPC protocol document defines the
// gRPC error for each HTTP/2 error code.
func resetError(f frame) error {
	if len(f.payload) != 4 {
		return fmt.Errorf("RST_STREAM has %d bytes: want 4", len(f.payload))
	}
	code, grpc := binary.BigEndian.Uint32(f.payload), codeInternal
	switch code {
	case 0x7: // REFUSED_STREAM
		grpc = codeUnavailable
	case 0xb: // ENHANCE_YOUR_CALM
		grpc = codeResourceExhausted
	}
	return &statusError{grpc, fmt.Sprintf("RST_STREAM with code %#x of HTTP/2", code)}
}

// checkGoAway returns the error for a GOAWAY frame (section 6.8). checkGoAway returns nil if the server still processes the request.
func checkGoAway(f frame) error {
	if len(f.payload) < 8 {
		return fmt.Errorf("GOAWAY has %d bytes: want at least 8", len(f.payload))
	}
	if binary.BigEndian.Uint32(f.payload)&^(1<<31) >= 1 {
		return nil
	}
	return &statusError{codeUnavailable, fmt.Sprintf("GOAWAY with code %#x of HTTP/2 %q", binary.BigEndian.Uint32(f.payload[4:]),
		f.payload[8:min(len(f.payload), 208)])}
}

// gRPC status codes (github.com/grpc/grpc/blob/master/doc/statuscodes.md).
const (
	codeUnknown           = 2
	codeNotFound          = 5
	codeResourceExhausted = 8
	codeUnimplemented     = 12
	codeInternal          = 13
	codeUnavailable       = 14
)

// statusError is a gRPC status other than OK.
type statusError struct {
	code    int
	message string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("gRPC code %d: %s", e.code, e.message)
}

// unescape() decodes the percent-encoding in the header grpc-message (section "Percent-Encoded" of the gRPC protocol document). unescape()
// leaves invalid escapes unchanged.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if c, err := strconv.ParseUint(s[i+1:min(i+3, len(s))], 16, 8); s[i] == '%' && i+2 < len(s) && err == nil {
			b.WriteByte(byte(c))
			i += 2
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
