// SPDX-License-Identifier: Apache-2.0

// Package reference reads, removes and writes what the reference plugins (github.com/containernetworking/plugins) create on the node for
// one attachment. Podlace needs it to take over their pods, and to return pods to them in a rollback. In this list, H is the SHA-512 hash
// of the network and the container ID, in hexadecimal digits:
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

// Attachment is an attachment with the names that the reference plugins give it. Bridge and Portmap handle its rules.
type Attachment struct {
	attachment.Key
	// Hashes are the hashes in the chain names: that of the attachment's key, then any other that the reference plugins use for it.
	Hashes []string
	// Addresses tells apart several attachments of one container to which the reference plugins give the same name. If it is empty, the
	// methods of Bridge and Portmap apply to all of them.
	Addresses []netip.Addr
}

// Of returns an attachment with Podlace's names. For eth0, they are those of the reference plugins.
func Of(key attachment.Key) Attachment {
	return Attachment{Key: key, Hashes: []string{key.ReferenceHash()}}
}

// Unrecorded returns an attachment without a record, with all names under which it may have rules.
func Unrecorded(key attachment.Key, plugin string) Attachment {
	return Attachment{Key: key, Hashes: key.ReferenceHashes(plugin)}
}

// KeyOf returns the key from which the reference plugins derive chain names. It contains eth0 for every interface.
func KeyOf(key attachment.Key) attachment.Key {
	key.IfName = "eth0"
	return key
}

// hashNames returns one name per hash: the prefix and the first digits of the hash.
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

// Backend returns the backend that the reference plugin would choose: the configured one, else iptables if it is installed, else nftables.
func Backend(named string) string {
	switch {
	case named != "":
		return named
	case iptables.Installed(true):
		return "iptables"
	}
	return "nftables"
}
