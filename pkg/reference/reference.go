// SPDX-License-Identifier: Apache-2.0

// Package reference reads, removes and writes what the reference plugins (github.com/containernetworking/plugins) make on a node for one
// attachment. Podlace takes over their pods, and a rollback hands pods back. H is SHA-512 of network and container ID, in hexadecimal
// digits:
//
//	bridge     chain CNI-H[:24] in nat of iptables and ip6tables, and jumps to it from POSTROUTING       all versions
//	bridge     rules of chain masq_checks in table inet cni_plugins_masquerade, whose comment begins
//	           with SHA-512(network)[:16]-SHA-512(interface:container)[:16]                              from 1.6.0
//	bridge     chains cni-br-iface-<container>-<interface> and the same with -mac in table bridge nat,
//	           and a jump from PREROUTING                                                                from 1.0.0
//	portmap    chain CNI-DN-H[:21] in nat, and jumps to it from CNI-HOSTPORT-DNAT                        all versions
//	portmap    chain CNI-SN-H[:21] in nat, and jumps to it from CNI-HOSTPORT-SNAT                        to 0.6
//	portmap    rules in tables ip and ip6 cni_hostport, in whatever chain, whose comment is the
//	           container ID. Chain hostip_hostports is of versions before 1.9.0                          from 1.6.0
//	bandwidth  link bwpH[:12], which pkg/bandwidth removes                                               all versions
package reference

import (
	"crypto/sha512"
	"encoding/hex"
	"net/netip"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
)

// Attachment is an attachment as the reference plugins name it. Bridge and Portmap are what the plugins of these names have of it.
type Attachment struct {
	attachment.Key
	// Hashes begin the names of chains. The first is that of the key; there may be a second one, of the reference.
	Hashes []string
	// Addresses tell attachments of one container apart where the reference does not; without any, all of the container's are meant.
	Addresses []netip.Addr
}

// Of returns an attachment under the names that Podlace gives it. For eth0 they are the reference's.
func Of(key attachment.Key) Attachment {
	return Attachment{Key: key, Hashes: []string{key.ReferenceHash()}}
}

// Unrecorded returns an attachment that has no record of a plugin, under all names that may be left of it.
func Unrecorded(key attachment.Key, plugin string) Attachment {
	return Attachment{Key: key, Hashes: key.ReferenceHashes(plugin)}
}

// KeyOf returns the key by which the reference names the chains of an attachment: that of eth0, whatever its interface is.
func KeyOf(key attachment.Key) attachment.Key {
	key.IfName = "eth0"
	return key
}

// names appends a part of each hash to a prefix.
func names(hashes []string, prefix string, digits int) (names []string) {
	for _, h := range hashes {
		names = append(names, prefix+h[:digits])
	}
	return names
}

func shortHash(text string) string {
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:8])
}

// Backend returns the backend that the reference takes: the one that is named, else iptables where it is installed.
func Backend(named string) string {
	switch {
	case named != "":
		return named
	case iptables.Installed(true):
		return "iptables"
	}
	return "nftables"
}
