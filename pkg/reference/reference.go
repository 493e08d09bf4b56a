// SPDX-License-Identifier: Apache-2.0

// Package reference reads, removes and writes the state that the reference plugins (github.com/containernetworking/plugins) create on the
// node for one attachment. Podlace takes over pods that the reference plugins attached. A rollback returns pods to the reference plugins.
// In the following list, H is the SHA-512 hash of the network and the container ID, in hexadecimal digits:
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

// Attachment is an attachment together with the names that the reference plugins give it. The types Bridge and Portmap handle the rules
// that the reference plugins bridge and portmap write for the attachment.
type Attachment struct {
	attachment.Key
	// Hashes contains the hashes from which the chain names are derived. The first element is the hash of the attachment's key. If the
	// reference plugins use another hash for the attachment, that hash is the second element.
	Hashes []string
	// Addresses contains the addresses of the attachment. A container can have several attachments to which the reference plugins give the
	// same name. The addresses distinguish these attachments. If Addresses is empty, the methods of Bridge and Portmap apply to the rules of
	// all attachments of the container.
	Addresses []netip.Addr
}

// Of returns an attachment together with the names that Podlace gives it. For the interface eth0, the reference plugins and Podlace use the
// same chain names.
func Of(key attachment.Key) Attachment {
	return Attachment{Key: key, Hashes: []string{key.ReferenceHash()}}
}

// Unrecorded returns an Attachment for an attachment that has no record. This Attachment contains all names under which rules of the
// attachment may exist.
func Unrecorded(key attachment.Key, plugin string) Attachment {
	return Attachment{Key: key, Hashes: key.ReferenceHashes(plugin)}
}

// KeyOf returns the key from which the reference plugins derive the chain names of an attachment. This key always contains eth0, even for
// another interface.
func KeyOf(key attachment.Key) attachment.Key {
	key.IfName = "eth0"
	return key
}

// hashNames returns one name for each hash: the prefix, followed by the first digits of the hash.
func hashNames(hashes []string, prefix string, digits int) (names []string) {
	for _, h := range hashes {
		names = append(names, prefix+h[:digits])
	}
	return names
}

func shortHash(text string) string {
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:8])
}

// Backend returns the backend that the reference plugin would choose. If the configuration contains a backend, the reference plugin always
// uses this backend. Without a configured backend, the reference plugin uses iptables if iptables is installed, and nftables otherwise.
func Backend(named string) string {
	switch {
	case named != "":
		return named
	case iptables.Installed(true):
		return "iptables"
	}
	return "nftables"
}
