// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// sendAdvertisements sends router advertisements (RFC 4861 section 4.2) through a link until the test ends.
func sendAdvertisements(t *testing.T, n *NS, link Link) {
	t.Helper()
	var fd int
	err := n.inNamespace(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6); err != nil {
			return err
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255)
	})
	kerneltest.Must(t, err)
	allNodes := unix.SockaddrInet6{ZoneId: uint32(link.Index)}
	copy(allNodes.Addr[:], net.IPv6linklocalallnodes)
	done := make(chan bool)
	go func() {
		defer unix.Close(fd)
		for {
			// the message has type 134, hop limit 64 and lifetime 1800 s; the kernel adds the checksum
			_ = unix.Sendto(fd, []byte{134, 0, 0, 0, 64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0}, 0, &allNodes)
			select {
			case <-done:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { close(done) })
}

func advertised(t *testing.T, h *Node, link Link) bool {
	t.Helper()
	routes, err := h.h.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{LinkIndex: link.Index, Protocol: unix.RTPROT_RA},
		netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
	kerneltest.Must(t, err)
	return len(routes) > 0
}

// TestKeepRouterAdvertisements: the kernel keeps the default route of a router advertisement when IPv6 forwarding is enabled later.
func TestKeepRouterAdvertisements(t *testing.T) {
	h := host(t)
	router, netns := podNS(t)
	kerneltest.Must(t, h.Set(Sysctl{"ipv6/conf/all/forwarding", "0"}), router.Set(Sysctl{"ipv6/conf/all/forwarding", "1"}))
	index, err := h.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: netns})
	kerneltest.Must(t, err)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0"), h.Set(Sysctl{"ipv6/conf/all/forwarding", "0"})) })
	uplink := Link{Index: index, Name: "kth0"}
	far := mustLink(t, router, "eth0")
	kerneltest.Must(t, h.Set(Sysctl{"ipv6/conf/kth0/accept_dad", "0"}), router.Set(Sysctl{"ipv6/conf/eth0/accept_dad", "0"}),
		router.SetUp(far),
		h.SetUp(uplink))
	sendAdvertisements(t, router, far)
	for deadline := time.Now().Add(time.Minute); !advertised(t, h, uplink); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no default route was learned")
		}
	}
	kerneltest.Must(t, h.KeepRouterAdvertisements(), h.Set(Sysctl{"ipv6/conf/all/forwarding", "1"}))
	if !advertised(t, h, uplink) {
		t.Error("the default route is gone")
	}
	for path, want := range map[string]string{"ipv6/conf/kth0/accept_ra": "2", "ipv6/conf/lo/accept_ra": "1"} {
		if got, err := h.Get(path); got != want || err != nil {
			t.Errorf("%s is %s, %v, want %s", path, got, err, want)
		}
	}
}

// TestKeepRouterAdvertisementsFails: an unreadable forwarding setting is an error, but a kernel without IPv6 is not.
func TestKeepRouterAdvertisementsFails(t *testing.T) {
	h, err := Host()
	kerneltest.Must(t, err)
	h.Close()
	if err := h.KeepRouterAdvertisements(); err == nil || IsNoFamily(err) {
		t.Errorf("without a socket: %v", err)
	}
	if err := fmt.Errorf("netconf show all: %w", unix.EOPNOTSUPP); !IsNoFamily(err) {
		t.Errorf("%v is not known", err)
	}
}
