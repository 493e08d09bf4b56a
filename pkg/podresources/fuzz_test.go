// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/http2"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

// recordBytes calls the given function, which writes frames as a server does. The result of recordBytes contains the written bytes.
func recordBytes(send func(*serverPeer)) []byte {
	var all bytes.Buffer
	near := &serverPeer{Framer: http2.NewFramer(&all, nil)}
	near.encode = newEncoder(&near.block)
	send(near)
	return all.Bytes()
}

// FuzzFrames compares frameReader with the HTTP/2 reader of x/net. frameReader and x/net must return the same frames, and must refuse the
// same DATA and HEADERS frames.
func FuzzFrames(f *testing.F) {
	f.Add(recordBytes(right))
	f.Add(recordBytes(func(p *serverPeer) {
		p.WriteDataPadded(1, true, []byte("x"), make([]byte, 3))
		p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, PadLength: 2, EndHeaders: true, Priority: http2.PriorityParam{Weight: 1},
			BlockFragment: []byte("abc")})
		p.WriteRawFrame(http2.FrameData, 8, 1, []byte{1})
	}))
	f.Fuzz(func(t *testing.T, data []byte) {
		ours, theirs := newFrames(bytes.NewReader(data), maxBytes), http2.NewFramer(nil, bytes.NewReader(data))
		theirs.AllowIllegalReads = true
		theirs.SetMaxReadFrameSize(maxFrame)
		for {
			want, refused := theirs.ReadFrame()
			got, err := ours.next()
			if err != nil {
				if refused == nil {
					t.Fatalf("%v, and x/net reads %v", err, want)
				}
				return
			}
			if got.stream == 0 || refused != nil && got.kind > frameHeaders {
				return // the reader does not check stream numbers
			}
			compareFrame(t, got, want, refused)
			if want == nil {
				return
			}
		}
	})
}

// compareFrame fails the test if a frame differs from the frame that x/net reads. compareFrame also fails the test if x/net refuses the
// frame.
func compareFrame(t *testing.T, got frame, want http2.Frame, refused error) {
	t.Helper()
	body, err := got.unpaddedPayload()
	switch want := want.(type) {
	case *http2.DataFrame:
		if err != nil || !bytes.Equal(body, want.Data()) || want.StreamID != got.stream || want.StreamEnded() != (got.flags&flagEndStream != 0) {
			t.Fatalf("got %+v %x, %v, want %v %x", got, body, err, want, want.Data())
		}
	case *http2.HeadersFrame:
		if err != nil || !bytes.Equal(body, want.HeaderBlockFragment()) || want.HeadersEnded() != (got.flags&flagEndHeaders != 0) {
			t.Fatalf("got %+v %x, %v, want %v", got, body, err, want)
		}
	case nil:
		if err == nil && got.kind <= frameHeaders {
			t.Fatalf("x/net refuses %+v: %v", got, refused)
		}
	}
}

// FuzzAnswer checks that, for every input, the client stops reading the response. The client must then return either a message or an error.
func FuzzAnswer(f *testing.F) {
	f.Add(recordBytes(right))
	f.Add(recordBytes(func(p *serverPeer) {
		p.WriteSettings()
		p.sendHeaders(true, ":status", "200", "grpc-status", "8", "grpc-message", "%41")
	}))
	f.Add(recordBytes(func(p *serverPeer) { p.begin(); p.WritePing(false, [8]byte{}); p.WriteGoAway(0, 2, []byte("x")) }))
	f.Add(recordBytes(func(p *serverPeer) { p.begin(); p.WriteRSTStream(1, 7) }))
	f.Add(recordBytes(func(p *serverPeer) {
		p.WriteSettings()
		block := p.encodeHeaders("grpc-status", "0")
		p.WriteRawFrame(http2.FrameHeaders, 0, 1, block[:3])
		p.WriteContinuation(1, true, block[3:])
	}))
	f.Fuzz(func(t *testing.T, data []byte) {
		conn := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(data), io.Discard}
		message, err := newExchange(conn).run()
		if err == nil && len(message) > len(data) || err != nil && message != nil || err != nil && err.Error() == "" {
			t.Fatalf("%x, %v", message, err)
		}
	})
}

// decodeWithAPI decodes a response with the Go code of the Kubernetes API. decodeWithAPI returns the devices in the same format as Ask.
func decodeWithAPI(list *api.ListPodResourcesResponse) (devices [][]poddevices.Device) {
	for _, p := range list.GetPodResources() {
		var held []poddevices.Device
		for i, c := range p.GetContainers() {
			for _, d := range c.GetDevices() {
				var nodes []int
				for _, n := range d.GetTopology().GetNodes() {
					nodes = append(nodes, int(n.GetID()))
				}
				for _, id := range d.GetDeviceIds() {
					held = append(held, poddevices.Device{Namespace: p.GetNamespace(), Pod: p.GetName(), Container: c.GetName(), Index: i,
						Resource: d.GetResourceName(), ID: id, NUMA: nodes, CPUs: c.GetCpuIds()})
				}
			}
		}
		devices = append(devices, held)
	}
	return devices
}

// FuzzMessage compares this package's decoder of messages with the Go code of the Kubernetes API.
func FuzzMessage(f *testing.F) {
	for _, list := range []*api.ListPodResourcesResponse{{}, {PodResources: []*api.PodResources{richPod(), webPod("app", "a"), {}}}} {
		data, err := proto.Marshal(list)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("\x0a\x0c\x1a\x0a\x12\x03\x12\x01a\x18\x05\x1a\x01\x07"))        // a CPU as a single number, and a packed list of one CPU
	f.Add([]byte("\x08\x05\x09aaaaaaaa\x0daaaa\xfa\x01\x01x\x0a\x00"))            // fields of every unknown type
	f.Add([]byte("\x0a\x0a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"))             // a length that exceeds the message
	f.Add([]byte("\x0a\x0b\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))         // the largest length
	f.Add([]byte("\x0a\x02\x0a\x00\x8a\x80\x80\x80\x80\x80\x80\x80\x80\x00\x00")) // a tag of ten bytes
	f.Fuzz(func(t *testing.T, data []byte) {
		var list api.ListPodResourcesResponse
		refused := proto.Unmarshal(data, &list)
		pods, err := decodePods(data)
		var got [][]poddevices.Device
		for _, p := range pods {
			devices, names, err2 := p.decodeContainers()
			if err2 != nil && err == nil {
				err = err2
			}
			if err == nil && len(names) != len(p.containers) {
				t.Fatalf("%q of %d", names, len(p.containers))
			}
			got = append(got, devices)
		}
		if err != nil && refused == nil && !strings.Contains(err.Error(), "of type 3") {
			t.Fatalf("%v, and the API's code reads %v", err, &list)
		}
		if err == nil && refused == nil && !cmp.Equal(decodeWithAPI(&list), got) {
			t.Fatal(cmp.Diff(decodeWithAPI(&list), got))
		}
	})
}

// FuzzCheckpoint checks that each returned entry is complete, and that no entries are returned together with an error. For each UID,
// readCheckpoint must return the same devices as CheckpointDevices.
func FuzzCheckpoint(f *testing.F) {
	for _, entries := range knownCheckpoints() {
		f.Add(marshal(f, entries), after)
	}
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}},"Checksum":01}`), after)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"`+after+`","DeviceIDs":[]}]}}`), after)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"`+after+`","ResourceName":"r"}],"RegisteredDevices":{}},"Checksum":1}`), before)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"2222222\u0032-0000-4000-8000-000000000002","ResourceName":"r","DeviceIDs":{"0":["a"]}}],"RegisteredDevices":{}},"Checksum":1}`), after)
	f.Fuzz(func(t *testing.T, data []byte, uid string) {
		entries, err := parseEntries(data)
		if err != nil && entries != nil {
			t.Fatalf("%v, %v", entries, err)
		}
		if slices.ContainsFunc(entries, func(e checkpointEntry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }) {
			t.Fatalf("%+v", entries)
		}
		if uid == "" {
			return
		}
		path := filepath.Join(t.TempDir(), "checkpoint")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		notes, err := CheckpointDevices(path)
		want := slices.DeleteFunc(slices.Clone(notes), func(n poddevices.Device) bool { return n.UID != uid })
		got, err2 := readCheckpoint(path, uid)
		if !cmp.Equal(deviceSet(want), deviceSet(got)) || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Fatalf("%v, %v; Notes has %v, %v", got, err2, want, err)
		}
	})
}
