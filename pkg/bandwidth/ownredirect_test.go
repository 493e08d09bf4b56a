// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// redirectItself redirects the pod's egress to an ifb device inside the pod, which delays packets. It calls send, removes the redirect, and
// then releases the packets.
func redirectItself(send func() error) error {
	if err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "own0", TxQLen: 1000}}); err != nil {
		return err
	}
	own, err := netlink.LinkByName("own0")
	if err != nil {
		return err
	}
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	index := eth0.Attrs().Index
	root := netlink.QdiscAttrs{LinkIndex: own.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	bucket := &netlink.Tbf{QdiscAttrs: root,
		Rate: 1000, Buffer: netlink.Xmittime(1000, 1514), Limit: 1e6} // a frame a second
	egress := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0),
		Parent: netlink.HANDLE_CLSACT}}
	if err := errors.Join(netlink.LinkSetUp(own), netlink.QdiscAdd(bucket), netlink.QdiscAdd(egress), netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1), Actions: []netlink.Action{netlink.NewMirredAction(own.Attrs().Index)},
	}), send(), netlink.QdiscDel(egress)); err != nil {
		return err
	}
	bucket.Rate, bucket.Buffer = 1e9, netlink.Xmittime(1e9, 1e5)
	return netlink.QdiscChange(bucket)
}

// TestOwnRedirectPassesLimit checks a known gap, described in SECURITY.md: a pod with CAP_NET_ADMIN can bypass its own egress limit with an
// ifb device. The first redirect sets the mark tc_skip_classify, which packets keep in another namespace. The test fails once the kernel
// closes this gap.
func TestOwnRedirectPassesLimit(t *testing.T) {
	const copies = 20
	l := quietLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, 1e9)))
	limited := func() uint64 {
		buckets, err := l.host.Buckets()
		l.must(err)
		return buckets[l.link(l.ifb("a")).Index].Sent
	}
	arrived := func() uint64 {
		link, err := netlink.LinkByName("bwt0")
		l.must(err)
		return link.Attrs().Statistics.RxPackets
	}
	frames := func() error { return kerneltest.Send("eth0", broadcastFrame(1000, experiment), copies) }
	arrives := func(send func() error) {
		t.Helper()
		want := arrived() + copies
		l.must(l.Pod.Do(send))
		for end := time.Now().Add(time.Minute); arrived() < want; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d of %d frames reach the host side", copies+arrived()-want, copies)
			}
		}
	}
	before := limited()
	arrives(frames)
	for end := time.Now().Add(time.Minute); limited()-before < copies*1000; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the limit counts %d bytes of %d", limited()-before, copies*1000)
		}
	}
	before = limited()
	arrives(func() error { return redirectItself(frames) })
	if got := limited() - before; got >= copies*1000 {
		t.Errorf("the limit counts %d bytes of %d", got, copies*1000)
	}
	l.OK(l.Call("DEL", "a"))
}
