// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// fakeSocket returns a socket that answers each request with the next reply.
func fakeSocket(t *testing.T, replies ...func(seq uint32) []byte) *socket {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer unix.Close(fds[1])
		buf := make([]byte, 4096)
		for _, reply := range replies {
			if n, err := unix.Read(fds[1], buf); err != nil || n < unix.NLMSG_HDRLEN {
				return
			}
			if _, err := unix.Write(fds[1], reply(native.Uint32(buf[8:]))); err != nil {
				return
			}
		}
	}()
	s := &socket{fd: fds[0], buf: make([]byte, 1<<16)}
	t.Cleanup(s.close)
	return s
}

func message(typ, flags uint16, seq uint32, body ...byte) []byte {
	b := native.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = native.AppendUint16(b, typ)
	b = native.AppendUint16(b, flags)
	b = native.AppendUint32(b, seq)
	return append(append(b, 0, 0, 0, 0), body...)
}

// replyWith returns a reply with one object and the end of the dump.
func replyWith(flagsOnObject, flagsOnEnd uint16) func(uint32) []byte {
	return func(seq uint32) []byte {
		return slices.Concat(
			message(100, 0, seq-1, 9, 9, 9, 9), // the rest of an older dump
			message(100, flagsOnObject, seq, 1, 2, 3, 4),
			message(unix.NLMSG_DONE, flagsOnEnd, seq, 0, 0, 0, 0))
	}
}

func failure(errno syscall.Errno) func(uint32) []byte {
	return func(seq uint32) []byte {
		return message(unix.NLMSG_ERROR, 0, seq, native.AppendUint32(nil, uint32(-int32(errno)))...)
	}
}

func TestDump(t *testing.T) {
	good := replyWith(0, 0)
	for _, c := range []struct {
		name    string
		replies []func(uint32) []byte
		want    [][]byte
		err     error
	}{
		{"good", []func(uint32) []byte{good}, [][]byte{{1, 2, 3, 4}}, nil},
		{"interrupted in the middle", []func(uint32) []byte{replyWith(unix.NLM_F_DUMP_INTR, 0), good}, [][]byte{{1, 2, 3, 4}}, nil},
		{"interrupted at the end", []func(uint32) []byte{replyWith(0, unix.NLM_F_DUMP_INTR), good}, [][]byte{{1, 2, 3, 4}}, nil},
		{"EINTR", []func(uint32) []byte{failure(unix.EINTR), failure(unix.EBUSY), good}, [][]byte{{1, 2, 3, 4}}, nil},
		{"always interrupted", slices.Repeat([]func(uint32) []byte{replyWith(unix.NLM_F_DUMP_INTR, 0)}, 20), nil, errInterrupted},
		{"no such table", []func(uint32) []byte{failure(unix.EOPNOTSUPP)}, nil, nil},
		{"refused", []func(uint32) []byte{failure(unix.EPERM)}, nil, unix.EPERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := fakeSocket(t, c.replies...).dump("things", 99, nil)
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestVLANs(t *testing.T) {
	const bridgeVLANInfo = 2
	body := make([]byte, unix.SizeofIfInfomsg)
	native.PutUint32(body[4:], 7)
	info := appendAttr(nil, bridgeVLANInfo, native.AppendUint16(native.AppendUint16(nil, 6), 100))
	body = appendAttr(body, unix.IFLA_AF_SPEC, info)
	s := fakeSocket(t, func(seq uint32) []byte {
		return slices.Concat(message(unix.RTM_NEWLINK, 0, seq, body...), message(unix.NLMSG_DONE, 0, seq, 0, 0, 0, 0))
	})
	c := &collector{scope: "host", links: map[uint32]link{7: {name: "v0"}}}
	if err := c.collectVLANs(s); err != nil {
		t.Fatal(err)
	}
	if len(c.records) != 1 || c.records[0].name != "vlan 100 dev v0 flags 6" {
		t.Errorf("got %v", c.records)
	}
}

// Many kernels do not support flowtables, so the socket is a fake.
func TestFlowtables(t *testing.T) {
	body := []byte{unix.NFPROTO_INET, 0, 0, 0}
	body = appendAttr(body, nftaFlowtableTable, []byte("lace\x00"))
	body = appendAttr(body, nftaFlowtableName, []byte("fast\x00"))
	body = appendAttr(body, nftaFlowtableHandle, make([]byte, 8))
	s := fakeSocket(t, func(seq uint32) []byte {
		return slices.Concat(message(nftType(unix.NFT_MSG_NEWFLOWTABLE), 0, seq, body...), message(unix.NLMSG_DONE, 0, seq, 0, 0, 0, 0))
	})
	c := &collector{scope: "host"}
	if err := c.collectFlowtables(s); err != nil {
		t.Fatal(err)
	}
	if len(c.records) != 1 || c.records[0].name != "nft flowtable inet lace fast" || len(c.records[0].fields) != 0 {
		t.Errorf("got %v", c.records)
	}
}

// Old kernels do not report IFA_PROTO.
func TestLinkLocalOfOldKernels(t *testing.T) {
	for _, c := range []struct {
		addr  string
		flags uint32
		want  bool
	}{
		{"fe80::ff:fe00:1", 0, true}, // derived from 02:00:00:00:00:01
		{"fe80::ff:fe00:2", 0, false},
		{"fe80::ff:fe00:2", unix.IFA_F_STABLE_PRIVACY, true},
		{"fd00::ff:fe00:1", 0, false},
	} {
		list := []attr{{unix.IFA_ADDRESS, netip.MustParseAddr(c.addr).AsSlice()}}
		if got := madeByKernel(list, c.flags, "02:00:00:00:00:01"); got != c.want {
			t.Errorf("%s flags %x: %v, want %v", c.addr, c.flags, got, c.want)
		}
	}
}

func TestShow(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{treeText(appendAttr(appendAttr(nil, 1, []byte("eth0\x00")), 2, []byte{0, 1, 2, 3, 4})), `{1:"eth0" 2:0001020304}`},
		{treeText([]byte{1, 2, 3}), "010203"},
		{userdataText(nil, []byte("\x00\x06hello\x00\x07\x01\xff")), `0:"hello" 7:ff`},
		{userdataText(nil, []byte("plain text")), `"plain text"`},
		{handleText(0x80010000), "auto:0"}, {handleText(0xffff0000), "ffff:0"}, {handleText(0x00010002), "1:2"}, {handleText(tcRoot), "root"},
		{expressionText(appendAttr(appendAttr(nil, 1, []byte("counter\x00")), 2, appendAttr(nil, 1, []byte{0, 0, 0, 0, 0, 0, 0, 9}))), "counter"},
	} {
		if c.got != c.want {
			t.Errorf("got %s, want %s", c.got, c.want)
		}
	}
}

func TestLegacyRules(t *testing.T) {
	got := legacyRules("# Generated by x on y\n*filter\n:INPUT ACCEPT [12:34]\n:FORWARD DROP [0:0]\n:PODS - [0:0]\n[5:60] -A FORWARD -j PODS\n-A PODS -j ACCEPT\nCOMMIT\n# Completed\n")
	want := []string{":FORWARD DROP", ":PODS -", "-A FORWARD -j PODS", "-A PODS -j ACCEPT"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func FuzzAttributes(f *testing.F) {
	f.Add(appendAttr(appendAttr(nil, 1, []byte("eth0\x00")), 2, []byte{0, 1, 2}))
	f.Add([]byte{4, 0, 1, 0, 3, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &collector{}
		_, _, _, _, _ = treeText(b), userdataText(c, b), expressions(b), c.actionsText(b), nexthopsText(c, b)
		_, _ = linkInfo(c, b), inet6Spec(c, b)
		if list, whole := parseAttrs(b); whole && len(b) > 0 && len(list) == 0 {
			t.Errorf("%x is said to be attributes", b)
		}
		_, _, _ = (&socket{}).split(b, new([][]byte))
	})
}
