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
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// serverPeer is the server's side of a connection after the server has read the request.
type serverPeer struct {
	*http2.Framer
	conn    net.Conn
	headers []hpack.HeaderField
	block   bytes.Buffer
	encode  *hpack.Encoder
}

// accept() reads the request.
func accept(conn net.Conn) (*serverPeer, error) {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err != nil || string(preface) != http2.ClientPreface {
		return nil, errors.Join(err, errors.New("no preface"))
	}
	p := &serverPeer{Framer: http2.NewFramer(conn, conn), conn: conn}
	p.encode = newEncoder(&p.block)
	p.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	for {
		f, err := p.ReadFrame()
		if err != nil {
			return nil, err
		}
		if h, ok := f.(*http2.MetaHeadersFrame); ok {
			p.headers = h.Fields
		}
		if f.Header().Flags.Has(http2.FlagDataEndStream) && f.Header().Type == http2.FrameData {
			return p, nil
		}
	}
}

// encodeHeaders encodes headers. The arguments of encodeHeaders are the names and the values of headers, alternately.
func (p *serverPeer) encodeHeaders(list ...string) []byte {
	p.block.Reset()
	for i := 0; i < len(list); i += 2 {
		p.encode.WriteField(hpack.HeaderField{Name: list[i], Value: list[i+1]})
	}
	return bytes.Clone(p.block.Bytes())
}

// sendHeaders sends headers or trailers in one frame.
func (p *serverPeer) sendHeaders(end bool, list ...string) {
	p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.encodeHeaders(list...), EndHeaders: true, EndStream: end})
}

func (p *serverPeer) begin() {
	p.WriteSettings()
	p.sendHeaders(false, ":status", "200", "content-type", "application/grpc")
}

// webMessage returns the response for the pod web-0, in the gRPC format: the length of the message comes before the message.
func webMessage() []byte {
	data, err := proto.Marshal(&api.GetPodResourcesResponse{PodResources: webPod("app", "a")})
	if err != nil {
		panic(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(data))), data...)
}

func right(p *serverPeer) {
	p.begin()
	p.WriteData(1, false, webMessage())
	p.sendHeaders(true, "grpc-status", "0")
}

// closeUnread closes the server's side of a connection without reading the request.
func closeUnread(t *testing.T, conn net.Conn) {
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	conn.Close()
}

// TestReset checks that Ask retries if the server closes the connection without reading the request.
func TestReset(t *testing.T) {
	k := newRoot(t)
	l := listen(t, k)
	defer l.Close()
	go func() {
		for i := range 3 {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if i < 2 {
				closeUnread(t, conn)
			} else if p, err := accept(conn); err == nil {
				right(p)
			}
		}
	}()
	if got, err := ask(t, k, ""); err != nil || !cmp.Equal(got, webDevices("app", "a")) {
		t.Errorf("%v, %v", got, err)
	}
}

// TestBacklog checks that Ask retries while the server's queue of connections is full.
func TestBacklog(t *testing.T) {
	k := newRoot(t)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "listener")
	defer file.Close()
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: k.Socket}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	var waiting net.Conn
	for err == nil { // until the queue is full: EAGAIN
		var conn net.Conn
		if conn, err = net.Dial("unix", k.Socket); err == nil {
			waiting = conn
			defer conn.Close()
		}
	}
	if waiting == nil || !errors.Is(err, syscall.EAGAIN) {
		t.Fatal(err)
	}
	if err := askUntilUp(t, k, syscall.EAGAIN.Error()); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("it did not wait: %v", err)
	}
}

// TestTemporary checks the error that a write returns if the server has just closed the connection. With a real server, a test cannot
// produce the exact timing of this error.
func TestTemporary(t *testing.T) {
	if err := fmt.Errorf("x: %w", &net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}); !isTemporary(err) {
		t.Error(err)
	}
	if err := fmt.Errorf("x: %w", &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EACCES)}); isTemporary(err) {
		t.Error(err)
	}
}

// serveEach answers the first connection with the first function, the second connection with the second function, and so on. The last
// function also answers all later connections. serveEach also returns a function that reports the number of connections.
func serveEach(t testing.TB, answers ...func(*serverPeer)) (k Kubelet, count func() int) {
	t.Helper()
	k = newRoot(t)
	l := listen(t, k)
	t.Cleanup(func() { l.Close() })
	came := make(chan struct{}, 1000)
	go func() {
		for i := 0; ; i++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			came <- struct{}{}
			if p, err := accept(conn); err != nil {
				t.Error(err)
			} else {
				answers[min(i, len(answers)-1)](p)
			}
			conn.Close()
		}
	}()
	return k, func() int { return len(came) }
}

// TestRequest checks that the request follows the gRPC protocol.
func TestRequest(t *testing.T) {
	got := make(chan []hpack.HeaderField, 1)
	k, _ := serveEach(t, func(p *serverPeer) { got <- p.headers; right(p) })
	if _, err := ask(t, k, ""); err != nil {
		t.Fatal(err)
	}
	want := []hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"},
		{Name: ":path", Value: "/v1.PodResourcesLister/Get"},
		{Name: ":authority", Value: "localhost"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
		{Name: "user-agent", Value: "podlace"}}
	if diff := cmp.Diff(want, <-got); diff != "" {
		t.Error(diff)
	}
}

// TestFrames checks that the client accepts optional frames from a server and still reads the response. Examples of optional frames and
// fields are padding, priority, split headers, settings, pings, unknown frames and a graceful GOAWAY. The client must acknowledge settings
// and pings.
func TestFrames(t *testing.T) {
	acked := make(chan []string, 1)
	k, count := serveEach(t, func(p *serverPeer) {
		p.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20}, http2.Setting{ID: 99, Val: 1})
		p.WriteSettingsAck()
		block := p.encodeHeaders(":status", "200", "content-type", "application/grpc+proto", "x", strings.Repeat("ü", 9000))
		p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:1], PadLength: 200, Priority: http2.PriorityParam{Weight: 7}})
		p.WriteContinuation(1, false, nil)
		p.WriteContinuation(1, false, block[1:9])
		p.WriteContinuation(1, false, block[9:9+maxFrame])
		p.WriteContinuation(1, true, block[9+maxFrame:])
		p.WritePing(false, [8]byte{1, 2, 3, 4, 5, 6, 7, 8})
		p.WritePing(true, [8]byte{9})
		p.WriteRawFrame(0xbe, 0xff, 77, []byte("whatever"))
		p.WriteWindowUpdate(1, 5)
		p.WriteWindowUpdate(0, 5)
		p.WritePriority(3, http2.PriorityParam{StreamDep: 1})
		p.WriteSettings()
		p.WriteGoAway(1<<31-1, http2.ErrCodeNo, []byte("soon"))
		p.WriteGoAway(1, http2.ErrCodeNo, nil)
		for _, b := range webMessage() {
			p.WriteDataPadded(1, false, []byte{b}, make([]byte, b))
		}
		p.WriteDataPadded(1, false, nil, nil)
		p.conn.Write([]byte{0, 0, 0, 0, 0, 0x80, 0, 0, 1}) // DATA with the reserved bit, which readers ignore
		p.WriteDataPadded(1, false, nil, make([]byte, 255))
		p.sendHeaders(true, "grpc-status", "0", "grpc-message", "")
		var acks []string
		defer func() { acked <- acks }()
		for {
			f, err := p.ReadFrame()
			if err != nil {
				return
			}
			acks = append(acks, f.Header().Type.String())
			if ping, ok := f.(*http2.PingFrame); ok && (!ping.IsAck() || ping.Data != [8]byte{1, 2, 3, 4, 5, 6, 7, 8}) {
				t.Errorf("got %v", ping)
			}
			if s, ok := f.(*http2.SettingsFrame); ok && !s.IsAck() {
				t.Errorf("got %v", s)
			}
		}
	})
	got, err := ask(t, k, "")
	if err != nil || !cmp.Equal(got, webDevices("app", "a")) || count() != 1 {
		t.Errorf("%v, %v, %d connections", got, err, count())
	}
	if acks := <-acked; !cmp.Equal(acks, []string{"SETTINGS", "PING", "SETTINGS"}) {
		t.Errorf("acknowledged %q", acks)
	}
}

// TestAgain checks that Ask retries if the server closes the connection before the end of the response, or refuses the request.
func TestAgain(t *testing.T) {
	for name, first := range map[string]func(*serverPeer){
		"closes at once":         func(*serverPeer) {},
		"closes after settings":  func(p *serverPeer) { p.WriteSettings() },
		"closes in the middle":   func(p *serverPeer) { p.begin(); p.WriteData(1, false, webMessage()[:9]) },
		"closes in a frame":      func(p *serverPeer) { p.begin(); p.conn.Write([]byte{0, 0, 9, 0, 0, 0, 0, 0, 1, 'x'}) },
		"closes in a head":       func(p *serverPeer) { p.begin(); p.conn.Write([]byte{0, 0}) },
		"closes before trailers": func(p *serverPeer) { p.begin(); p.WriteData(1, false, webMessage()) },
		"closes in headers":      func(p *serverPeer) { p.WriteSettings(); p.WriteRawFrame(http2.FrameHeaders, 0, 1, nil) },
		"refuses":                func(p *serverPeer) { p.WriteSettings(); p.WriteRSTStream(1, http2.ErrCodeRefusedStream) },
		"calms":                  func(p *serverPeer) { p.begin(); p.WriteRSTStream(1, http2.ErrCodeEnhanceYourCalm) },
		"goes away": func(p *serverPeer) {
			p.WriteSettings()
			p.WriteGoAway(0, http2.ErrCodeNo, nil)
			io.Copy(io.Discard, p.conn)
		},
		"is unavailable": func(p *serverPeer) { p.WriteSettings(); p.sendHeaders(true, ":status", "200", "grpc-status", "14") },
	} {
		k, count := serveEach(t, first, first, right)
		if got, err := ask(t, k, ""); err != nil || !cmp.Equal(got, webDevices("app", "a")) || count() != 3 {
			t.Errorf("%s: %v, %v, %d connections", name, got, err, count())
		}
	}
}

// TestGarbage checks that an invalid response causes a permanent error. The error must describe the invalid response.
func TestGarbage(t *testing.T) {
	raw := func(b string) func(*serverPeer) {
		return func(p *serverPeer) { p.conn.Write([]byte(b)); io.Copy(io.Discard, p.conn) }
	}
	after := func(f func(*serverPeer)) func(*serverPeer) {
		return func(p *serverPeer) { p.begin(); f(p); io.Copy(io.Discard, p.conn) }
	}
	ends := func(data string, trailers ...string) func(*serverPeer) {
		return after(func(p *serverPeer) { p.WriteData(1, false, []byte(data)); p.sendHeaders(true, trailers...) })
	}
	ok := []string{"grpc-status", "0"}
	for says, answer := range map[string]func(*serverPeer){
		"a frame has 4740180 bytes: want at most 16384": raw("HTTP/1.1 400 Bad Request\r\n\r\n"),
		"the first frame has type 0":                    raw(strings.Repeat("\x00", 100)),
		"the first frame has type 4":                    func(p *serverPeer) { p.WriteSettingsAck(); io.Copy(io.Discard, p.conn) },
		"belongs to stream 3":                           after(func(p *serverPeer) { p.WriteData(3, false, nil) }),
		"unexpected frame of type 5": after(func(p *serverPeer) {
			p.WriteRawFrame(http2.FramePushPromise, 4, 1, make([]byte,
				4))
		}),
		"unexpected frame of type 9": after(func(p *serverPeer) { p.WriteContinuation(1, true, nil) }),
		"the headers are incomplete": after(func(p *serverPeer) {
			p.WriteRawFrame(http2.FrameHeaders, 0, 1, nil)
			p.WriteData(1, true,
				nil)
		}),
		"a frame of 3 bytes has 3 bytes of padding": after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameData, 8, 1, []byte{3, 0, 0}) }),
		"a frame of 0 bytes has 1 bytes of padding": after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameHeaders, 8|4, 1, nil) }),
		"a frame of 4 bytes has 0 bytes of padding": after(func(p *serverPeer) {
			p.WriteRawFrame(http2.FrameHeaders, 0x20|4, 1, make([]byte,
				4))
		}),
		"RST_STREAM has 3 bytes":                    after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameRSTStream, 0, 1, make([]byte, 3)) }),
		"GOAWAY has 7 bytes":                        after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameGoAway, 0, 0, make([]byte, 7)) }),
		"gRPC code 13: RST_STREAM with code 0x2":    after(func(p *serverPeer) { p.WriteRSTStream(1, http2.ErrCodeInternal) }),
		"headers: decoding error: invalid indexed ": after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameHeaders, 4, 1, []byte{0xfe}) }),
		"truncated headers":                         after(func(p *serverPeer) { p.WriteRawFrame(http2.FrameHeaders, 4, 1, []byte{0x40, 9}) }),
		"headers of more than 1048576 bytes": after(func(p *serverPeer) {
			p.WriteRawFrame(http2.FrameHeaders, 0, 1, p.encodeHeaders("x", strings.Repeat("y", 4000)))
			for range 300 {
				p.WriteContinuation(1, false, bytes.Repeat([]byte{0x80 | 62}, 9000)) // the field above, each byte repeated
			}
		}),
		`HTTP status "404", content-type "text/html", grpc-status ""`: func(p *serverPeer) {
			p.WriteSettings()
			p.sendHeaders(true, ":status", "404", "content-type", "text/html")
		},
		`grpc-status "-1"`:                        ends("", "grpc-status", "-1"),
		`grpc-status ""`:                          ends(string(webMessage()), "x", "y"),
		"has 0 bytes and begins with : want":      ends("", ok...),
		"has 4 bytes and begins with 00000000:":   ends("\x00\x00\x00\x00", ok...),
		"begins with 0100000001":                  ends("\x01\x00\x00\x00\x01x", ok...),
		"has 6 bytes and begins with 0000000002":  ends("\x00\x00\x00\x00\x02x", ok...),
		"has 7 bytes and begins with 0000000001":  ends("\x00\x00\x00\x00\x01xy", ok...),
		"not a valid PodResources message: tag 0": ends("\x00\x00\x00\x00\x02\x00\x00", ok...),
		"the frames exceed the limit": after(func(p *serverPeer) {
			for p.WriteRawFrame(0xbe, 0, 0, make([]byte, maxFrame)) == nil {
			}
		}),
	} {
		k, count := serveEach(t, answer)
		got, err := ask(t, k, "")
		if err == nil || !strings.Contains(err.Error(), says) || count() != 1 ||
			!strings.HasPrefix(err.Error(), "ask the kubelet at "+k.Socket+" which devices pod shop/web-0 has: Get: ") {
			t.Errorf("%s: %v, %.300v, %d connections", says, got, err, count())
		}
	}
}

// TestUnescape checks the rules for percent-encoding in the gRPC document. For example, invalid escapes must stay unchanged.
func TestUnescape(t *testing.T) {
	for s, want := range map[string]string{"": "", "a%20b": "a b", "%c3%BC": "ü", "%": "%", "%4": "%4", "%zz": "%zz", "%41%": "A%",
		"%%41": "%A", "%+1": "%+1", "a%2": "a%2"} {
		if got := unescape(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}

// TestDribble reads a response whose bytes arrive one at a time.
func TestDribble(t *testing.T) {
	near, far := net.Pipe()
	go func() {
		defer far.Close()
		p, err := accept(far)
		if err != nil {
			t.Error(err)
			return
		}
		go io.Copy(io.Discard, far) // the acknowledgements
		var all bytes.Buffer
		p.Framer = http2.NewFramer(&all, nil)
		right(p)
		for _, b := range all.Bytes() {
			far.Write([]byte{b})
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	context.AfterFunc(ctx, func() { near.SetDeadline(time.Unix(1, 0)) })
	data, err := encodeRequest("/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	go near.Write(data)
	if got, err := newExchange(near).run(); err != nil || !bytes.Equal(got, webMessage()[5:]) {
		t.Errorf("%x, %v", got, err)
	}
}

func newEncoder(to io.Writer) *hpack.Encoder { return hpack.NewEncoder(to) }
