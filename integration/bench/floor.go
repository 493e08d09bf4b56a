// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/podlace/podlace/pkg/sandbox"
	"golang.org/x/sys/unix"
)

// Interface numbers of the floor's node. A link can be created under a chosen number, which lets every message be
// written down before anything exists.
const (
	floorBridge = 9001 + iota
	floorHost
	floorPod
	floorIFB
)

const floorBandwidthBurst = 256 << 10 // bytes

// floorChain does for a scenario what the kernel and the store must see, in as many processes as the chain has.
type floorChain struct {
	program string
	s       scenario
	node    *sandbox.Pod
	pod     *sandbox.Pod
	lease   string
	address netip.Prefix
	gateway netip.Prefix
}

func newFloorChain(program, name string, s scenario, node, pod *sandbox.Pod) (*floorChain, error) {
	subnet, err := netip.ParsePrefix(s.subnet)
	if err != nil {
		return nil, fmt.Errorf("parse subnet: %w", err)
	}
	gateway := subnet.Addr().Next()
	c := &floorChain{
		program: program, s: s, node: node, pod: pod,
		address: netip.PrefixFrom(gateway.Next(), subnet.Bits()),
		gateway: netip.PrefixFrom(gateway, subnet.Bits()),
	}
	c.lease = filepath.Join(resultsFolder, "floor-"+name, c.address.Addr().String())
	return c, nil
}

// setUp makes what the first attachment of a network makes once: bridge, table and map.
func (c *floorChain) setUp() error {
	if err := os.MkdirAll(filepath.Dir(c.lease), 0o755); err != nil {
		return fmt.Errorf("create the floor's store: %w", err)
	}
	var bridge script
	bridge.step(opSocket, unix.NETLINK_ROUTE, nil)
	bridge.send(
		newLink(floorBridge).attr(unix.IFLA_IFNAME, text(c.s.bridge())).
			nest(unix.IFLA_LINKINFO, attr(unix.IFLA_INFO_KIND, text("bridge"))),
		newAddress(floorBridge, c.gateway),
	)
	all := []process{{"bridge", bridge}}
	if c.s.backend != "" {
		all = append(all, process{"portmap", tableScript()})
	}
	return c.play(all, execute)
}

// process is what the floor does in the place of one plugin.
type process struct {
	plugin string
	script script
}

// run plays one verb, process by process, inside the node's network namespace.
func (c *floorChain) run(verb string, exec runner) error {
	var all []process
	switch verb {
	case verbAdd:
		all = []process{{"bridge", c.bridgeAdd()}, {"portmap", c.portmapAdd()}, {"bandwidth", bandwidthAdd()}}
	case verbCheck:
		all = []process{{"bridge", c.bridgeCheck()}, {"portmap", c.portmapCheck()}, {"bandwidth", bandwidthCheck()}}
	default:
		all = []process{{"bridge", c.bridgeDel()}, {"portmap", c.portmapDel()}, {"bandwidth", bandwidthDel()}}
	}
	if c.s.backend == "" {
		all = all[:1]
	}
	if verb == verbDel {
		slices.Reverse(all)
	}
	return c.play(all, exec)
}

func (c *floorChain) play(processes []process, exec runner) error {
	return c.node.Do(func() error {
		for _, p := range processes {
			p.script.step(opPrint, 0, c.result())
			if _, err := exec(invocation{name: p.plugin, path: c.program, stdin: p.script}); err != nil {
				return fmt.Errorf("floor of %s: %w", p.plugin, err)
			}
		}
		return nil
	})
}

func (c *floorChain) result() []byte {
	out, _ := json.Marshal(map[string]any{
		"cniVersion": cniVersion, "interfaces": []any{map[string]string{"name": podInterface, "sandbox": c.pod.Path}},
		"ips": []any{map[string]string{"address": c.address.String(), "gateway": c.gateway.Addr().String()}},
	})
	return out
}

func (c *floorChain) bridgeAdd() script {
	var s script
	s.step(opCreate, 0, append(text(c.lease), "bench\r\n"+podInterface...))
	s.step(opNetns, 0, []byte(c.pod.Path))
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(newLink(floorHost).
		attr(unix.IFLA_IFNAME, text("vethfloor")).
		attr(unix.IFLA_MASTER, native32(floorBridge)).
		nest(unix.IFLA_LINKINFO, vethToPod()...))
	s.step(opEnter, 0, nil)
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(
		newAddress(floorPod, c.address),
		newMessage(unix.RTM_NEWLINK, unix.NLM_F_ACK, linkHeader(floorPod, true)),
		defaultRoute(floorPod, c.gateway.Addr()),
	)
	return s
}

func (c *floorChain) bridgeCheck() script {
	var s script
	s.step(opRead, 0, []byte(c.lease))
	s.step(opNetns, 0, []byte(c.pod.Path))
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(newMessage(unix.RTM_GETLINK, unix.NLM_F_ACK, linkHeader(floorHost, false)))
	s.step(opEnter, 0, nil)
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(newMessage(unix.RTM_GETLINK, unix.NLM_F_ACK, linkHeader(floorPod, false)))
	s.send(newMessage(unix.RTM_GETADDR, unix.NLM_F_DUMP, addressHeader(0, 0)))
	s.send(newMessage(unix.RTM_GETROUTE, unix.NLM_F_DUMP, make([]byte, unix.SizeofRtMsg)))
	return s
}

func (c *floorChain) bridgeDel() script {
	var s script
	s.step(opRemove, 0, []byte(c.lease))
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(newMessage(unix.RTM_DELLINK, unix.NLM_F_ACK, linkHeader(floorHost, false)))
	return s
}

func bandwidthAdd() script {
	var s script
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(
		newLink(floorIFB).attr(unix.IFLA_IFNAME, text("ifbfloor")).
			attr(unix.IFLA_TXQLEN, native32(0)).
			nest(unix.IFLA_LINKINFO, attr(unix.IFLA_INFO_KIND, text("ifb"))),
		tokenBucket(floorHost),
		newQdisc(floorHost, unixIngressHandle, tcIngress).attr(unix.TCA_KIND, text("ingress")),
		redirect(floorHost, floorIFB),
		tokenBucket(floorIFB),
	)
	return s
}

func bandwidthCheck() script {
	var s script
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(
		newMessage(unix.RTM_GETLINK, unix.NLM_F_ACK, linkHeader(floorIFB, false)),
		newMessage(unix.RTM_GETQDISC, unix.NLM_F_ACK, trafficHeader(floorHost, 0, tcRoot, 0)),
		newMessage(unix.RTM_GETQDISC, unix.NLM_F_ACK, trafficHeader(floorIFB, 0, tcRoot, 0)),
	)
	return s
}

func bandwidthDel() script {
	var s script
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(newMessage(unix.RTM_DELLINK, unix.NLM_F_ACK, linkHeader(floorIFB, false)))
	return s
}

// linkHeader is an ifinfomsg; up sets the flag and its mask.
func linkHeader(index uint32, up bool) []byte {
	out := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(out[4:], index)
	if up {
		binary.NativeEndian.PutUint32(out[8:], unix.IFF_UP)
		binary.NativeEndian.PutUint32(out[12:], unix.IFF_UP)
	}
	return out
}

const createNew = unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_EXCL

func newLink(index uint32) *message {
	return newMessage(unix.RTM_NEWLINK, createNew, linkHeader(index, true))
}

// addressHeader is an ifaddrmsg of family IPv4.
func addressHeader(index uint32, bits int) []byte {
	out := []byte{unix.AF_INET, byte(bits), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}
	return binary.NativeEndian.AppendUint32(out, index)
}

// vethToPod describes a veth whose peer is born in the opened namespace under the pod's interface name.
func vethToPod() [][]byte {
	peer := append(linkHeader(floorPod, false), attr(unix.IFLA_IFNAME, text(podInterface))...)
	peer = append(peer, attr(unix.IFLA_NET_NS_FD, native32(netnsFD))...)
	return [][]byte{
		attr(unix.IFLA_INFO_KIND, text("veth")),
		nest(unix.IFLA_INFO_DATA, attr(vethInfoPeer, peer)),
	}
}

func newAddress(index uint32, address netip.Prefix) *message {
	return newMessage(unix.RTM_NEWADDR, createNew, addressHeader(index, address.Bits())).
		attr(unix.IFA_LOCAL, address.Addr().AsSlice()).
		attr(unix.IFA_ADDRESS, address.Addr().AsSlice())
}

func defaultRoute(index uint32, gateway netip.Addr) *message {
	header := []byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE,
		unix.RTN_UNICAST, 0, 0, 0, 0}
	return newMessage(unix.RTM_NEWROUTE, createNew, header).
		attr(unix.RTA_GATEWAY, gateway.AsSlice()).
		attr(unix.RTA_OIF, native32(index))
}
