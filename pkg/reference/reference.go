// SPDX-License-Identifier: Apache-2.0

// Package reference reads, removes and writes the node state of the reference plugins (github.com/containernetworking/plugins) for one
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
//	portmap    rules in tables ip and ip6 cni_hostport, in any chain, whose comment is the
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

// Attachment is an attachment under the reference plugins' names. Bridge and Portmap access the rules of these plugins for it.
type Attachment struct {
	attachment.Key
	// Hashes are the bases of the chain names: first the key's, then optionally the reference's.
	Hashes []string
	// Addresses distinguish attachments of one container if the reference does not. Without addresses, all attachments of the container are
	// meant.
	Addresses []netip.Addr
}

// Of returns an attachment under the names that Podlace gives it. For eth0 these are the reference's names.
func Of(key attachment.Key) Attachment {
	return Attachment{Key: key, Hashes: []string{key.ReferenceHash()}}
}

// Unrecorded returns an attachment without a plugin's record, under all names that its residue may have.
func Unrecorded(key attachment.Key, plugin string) Attachment {
	return Attachment{Key: key, Hashes: key.ReferenceHashes(plugin)}
}

// KeyOf returns the key from which the reference derives an attachment's chain names: that of eth0 for any interface.
func KeyOf(key attachment.Key) attachment.Key {
	key.IfName = "eth0"
	return key
}

// names returns the prefix followed by the first digits of each hash.
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

// Backend returns the reference's choice of a backend: the configured one, or else iptables if it is installed.
func Backend(named string) string {
	switch {
	case named != "":
		return named
	case iptables.Installed(true):
		return "iptables"
	}
	return "nftables"
}
