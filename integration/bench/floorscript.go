// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Numbers of linux/veth.h, pkt_sched.h, pkt_cls.h and tc_act/tc_mirred.h that x/sys/unix does not name.
const (
	vethInfoPeer = 1

	tcRoot            = 0xffffffff
	tcIngress         = 0xfffffff1
	unixIngressHandle = 0xffff0000

	tbfParms        = 1
	tbfBurst        = 6
	ticksPerSecond  = 1e9 / 64 // the packet scheduler counts in units of 64 ns
	ethernetTC      = 1        // TC_LINKLAYER_ETHERNET
	u32Selector     = 5
	u32Action       = 7
	u32Terminal     = 1
	actionKind      = 1
	actionOptions   = 2
	mirredParms     = 2
	redirectEgress  = 1
	actionStolen    = 4
	floorFilterPrio = 1
)

// trafficHeader is a tcmsg.
func trafficHeader(index, handle, parent, info uint32) []byte {
	out := make([]byte, 4, 20)
	for _, v := range []uint32{index, handle, parent, info} {
		out = binary.NativeEndian.AppendUint32(out, v)
	}
	return out
}

func newQdisc(index, handle, parent uint32) *message {
	return newMessage(unix.RTM_NEWQDISC, createNew, trafficHeader(index, handle, parent, 0))
}

// tokenBucket is a root tbf at the pod's rate.
func tokenBucket(index uint32) *message {
	const rate = podRate / 8
	parms := make([]byte, 36) // tc_tbf_qopt: rate (12), peakrate (12), limit, buffer, mtu
	parms[1] = ethernetTC
	binary.NativeEndian.PutUint32(parms[8:], rate)
	binary.NativeEndian.PutUint32(parms[24:], floorBandwidthBurst+rate/40)
	binary.NativeEndian.PutUint32(parms[28:], floorBandwidthBurst*ticksPerSecond/rate)
	return newQdisc(index, 0x10000, tcRoot).
		attr(unix.TCA_KIND, text("tbf")).
		nest(unix.TCA_OPTIONS, attr(tbfParms, parms), attr(tbfBurst, native32(floorBandwidthBurst)))
}

// redirect sends all that a link receives out of another one.
func redirect(from, to uint32) *message {
	selector := make([]byte, 16) // tc_u32_sel without keys, which matches everything
	selector[0] = u32Terminal
	mirred := make([]byte, 28) // tc_gen (20), eaction, ifindex
	binary.NativeEndian.PutUint32(mirred[8:], actionStolen)
	binary.NativeEndian.PutUint32(mirred[20:], redirectEgress)
	binary.NativeEndian.PutUint32(mirred[24:], to)
	action := nest(1, attr(actionKind, text("mirred")), nest(actionOptions, attr(mirredParms, mirred)))
	info := uint32(floorFilterPrio)<<16 | uint32(binary.NativeEndian.Uint16(big16(unix.ETH_P_ALL)))
	return newMessage(unix.RTM_NEWTFILTER, createNew, trafficHeader(from, 0, unixIngressHandle, info)).
		attr(unix.TCA_KIND, text("u32")).
		nest(unix.TCA_OPTIONS, attr(u32Selector, selector), nest(u32Action, action))
}

const (
	floorTable = "floor"
	floorMap   = "hostports"
)

// nftMessage addresses an nftables request of the IPv4 family.
func nftMessage(kind int, flags uint16) *message {
	return newMessage(uint16(unix.NFNL_SUBSYS_NFTABLES<<8|kind), flags, []byte{unix.NFPROTO_IPV4, 0, 0, 0})
}

// nftBatch encloses requests into one transaction.
func nftBatch(s *script, requests ...*message) {
	header := append([]byte{unix.AF_UNSPEC, 0}, big16(unix.NFNL_SUBSYS_NFTABLES)...)
	all := append([]*message{newMessage(unix.NFNL_MSG_BATCH_BEGIN, 0, header)}, requests...)
	s.batch(len(requests), append(all, newMessage(unix.NFNL_MSG_BATCH_END, 0, header))...)
}

// tableScript makes a map from protocol and port to address and port.
func tableScript() script {
	var s script
	s.step(opSocket, unix.NETLINK_NETFILTER, nil)
	nftBatch(&s,
		nftMessage(unix.NFT_MSG_NEWTABLE, createNew).attr(unix.NFTA_TABLE_NAME, text(floorTable)),
		nftMessage(unix.NFT_MSG_NEWSET, createNew).
			attr(unix.NFTA_SET_TABLE, text(floorTable)).
			attr(unix.NFTA_SET_NAME, text(floorMap)).
			attr(unix.NFTA_SET_FLAGS, big32(unix.NFT_SET_MAP)).
			attr(unix.NFTA_SET_KEY_TYPE, big32(0)).
			attr(unix.NFTA_SET_KEY_LEN, big32(8)).
			attr(unix.NFTA_SET_DATA_TYPE, big32(0)).
			attr(unix.NFTA_SET_DATA_LEN, big32(8)).
			attr(unix.NFTA_SET_ID, big32(1)),
	)
	return s
}

// element addresses one port in the map; without an address it names the key alone.
func element(kind int, flags uint16, port int, address netip.Addr) *message {
	key := append([]byte{unix.IPPROTO_TCP, 0, 0, 0}, pad(big16(uint16(port)))...)
	attrs := [][]byte{nest(unix.NFTA_SET_ELEM_KEY, attr(unix.NFTA_DATA_VALUE, key))}
	if address.IsValid() {
		data := append(address.AsSlice(), pad(big16(podPort))...)
		attrs = append(attrs, nest(unix.NFTA_SET_ELEM_DATA, attr(unix.NFTA_DATA_VALUE, data)))
	}
	return nftMessage(kind, flags).
		attr(unix.NFTA_SET_ELEM_LIST_TABLE, text(floorTable)).
		attr(unix.NFTA_SET_ELEM_LIST_SET, text(floorMap)).
		nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, nest(unix.NFTA_LIST_ELEM, attrs...))
}

func (c *floorChain) portmapAdd() script {
	var s script
	s.step(opSocket, unix.NETLINK_NETFILTER, nil)
	nftBatch(&s, element(unix.NFT_MSG_NEWSETELEM, createNew, c.s.port, c.address.Addr()))
	return s
}

func (c *floorChain) portmapCheck() script {
	var s script
	s.step(opSocket, unix.NETLINK_NETFILTER, nil)
	s.send(element(unix.NFT_MSG_GETSETELEM, unix.NLM_F_ACK, c.s.port, netip.Addr{}))
	return s
}

func (c *floorChain) portmapDel() script {
	var s script
	s.step(opSocket, unix.NETLINK_NETFILTER, nil)
	nftBatch(&s, element(unix.NFT_MSG_DELSETELEM, unix.NLM_F_ACK, c.s.port, netip.Addr{}))
	return s
}
