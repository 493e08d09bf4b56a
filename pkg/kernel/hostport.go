// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// HostPort forwards a port of the node to a port of a pod.
type HostPort struct {
	Protocol string         `json:"protocol"`         // "tcp", "udp" or "sctp"
	HostIP   netip.Addr     `json:"hostIP,omitzero"`  // invalid: every address of the node of the pod's family
	Port     uint16         `json:"port"`             // on the node
	To       netip.AddrPort `json:"to"`               // in the pod
	SNAT     bool           `json:"snat,omitempty"`   // masquerade what would not come back: hairpin and localhost
	MasqAll  bool           `json:"masqAll,omitzero"` // masquerade every source
}

// String returns "protocol hostIP:port".
func (p HostPort) String() string {
	if p.HostIP.IsValid() {
		return p.Protocol + " " + netip.AddrPortFrom(p.HostIP, p.Port).String()
	}
	return fmt.Sprintf("%s %d", p.Protocol, p.Port)
}

// maxComment is what nft(8) shows of a comment.
const maxComment = 128

var protocols = map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}

// elements returns the elements that stand for the port; owner is their comment.
func (p HostPort) elements(owner string) []element {
	family := familyDigit(p.To.Addr().Is4())
	port := key(p.protocol(), be16(p.Port))
	e := element{Set: "ports" + family, Key: port}
	if p.HostIP.IsValid() {
		e = element{Set: "hostip_ports" + family, Key: key(p.HostIP.AsSlice(), port)}
	}
	e.Value, e.Comment = key(p.To.Addr().AsSlice(), be16(p.To.Port())), owner
	out := []element{e}
	// The connection is told from a Service's to the same pod by the port that the client used.
	back := key(p.To.Addr().AsSlice(), port)
	if p.SNAT {
		out = append(out, element{Set: "snat" + family, Key: back, Comment: owner})
	}
	if p.MasqAll {
		out = append(out, element{Set: "masqall" + family, Key: back, Comment: owner})
	}
	return out
}

func (p HostPort) protocol() []byte { return []byte{protocols[p.Protocol]} }

func familyDigit(is4 bool) string {
	if is4 {
		return "4"
	}
	return "6"
}

func be16(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }

// key concatenates fields as nf_tables does: each padded to a multiple of four bytes.
func key(fields ...[]byte) []byte {
	var out []byte
	for _, f := range fields {
		out = append(out, f...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return out
}

func elementsOf(ports []HostPort, owner string) []element {
	if len(owner) > maxComment-1 {
		owner = owner[:maxComment-1]
	}
	var out []element
	seen := map[string]bool{}
	for _, p := range ports {
		for _, e := range p.elements(owner) {
			if id := e.Set + string(e.Key); !seen[id] {
				seen[id] = true
				out = append(out, e)
			}
		}
	}
	return out
}

// AddHostPorts forwards the ports, all or none, in one transaction. owner names who has them; its first word, a hash, decides who
// may delete them. bridge is the bridge behind which the pod is, "" when it is alone behind its link. A port that another owner has
// gives code 104.
func (n *Node) AddHostPorts(owner, bridge string, ports []HostPort) error {
	t, err := openNFT(hostportTable)
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.ensureHostports(); err != nil {
		return err
	}
	elements := elementsOf(ports, owner)
	err = t.add(elements)
	if isExist(err) {
		err = t.replaceOwn(elements)
	}
	if err != nil {
		return err
	}
	if bridge == "" {
		return nil
	}
	return t.ensureHairpin(bridge)
}

// ProtectLoopback drops what comes from elsewhere for 127.0.0.0/8. It must be called before route_localnet is set on a link.
func (n *Node) ProtectLoopback() error {
	t, err := openNFT(hostportTable)
	if err != nil {
		return err
	}
	defer t.close()
	return t.ensureHostports()
}

// ensureHostports makes the table unless it has the mark of this version of it.
func (t *nft) ensureHostports() error {
	if ok, err := t.marked(schema); ok || err != nil {
		return err
	}
	return skeleton("nft add table "+hostportTable, buildHostports)
}

// replaceOwn adds elements of which some exist: those of the same owner are replaced, others are a clash.
func (t *nft) replaceOwn(elements []element) error {
	var own []element
	for _, e := range elements {
		found, ok, err := t.get(e)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		if ownerHash(found.Comment) != ownerHash(e.Comment) {
			return plugin.Errorf(plugin.CodePortConflict, "hostPort %s is in use by %s", keyText(e), ownerText(found.Comment))
		}
		own = append(own, element{Set: e.Set, Key: e.Key})
	}
	return t.replace(own, elements)
}

// keyText renders the protocol and port that end the key of a map.
func keyText(e element) string {
	port := e.Key[len(e.Key)-4:]
	for name, number := range protocols {
		if e.Key[len(e.Key)-8] == number {
			return fmt.Sprintf("%s %d", name, binary.BigEndian.Uint16(port))
		}
	}
	return fmt.Sprint(binary.BigEndian.Uint16(port))
}

func ownerHash(comment string) string {
	hash, _, _ := strings.Cut(comment, " ")
	return hash
}

func ownerText(comment string) string {
	if _, name, ok := strings.Cut(comment, " "); ok {
		return name
	}
	return comment
}

// ensureHairpin lets connections that come in and go out through the same link be masqueraded: their answers would otherwise go
// straight back, past the node that has to translate them.
func (t *nft) ensureHairpin(link string) error {
	e := element{Set: "hairpin", Key: append(ifname(link), ifname(link)...)}
	_, ok, err := t.get(e)
	if err != nil || ok {
		return err
	}
	err = t.add([]element{e})
	return ignore(err, unix.EEXIST)
}

// ifname pads an interface name as nf_tables keeps it.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// DelHostPorts ends the forwarding of ports that the owner still has, in one transaction.
func (n *Node) DelHostPorts(owner string, ports []HostPort) error {
	if len(ports) == 0 {
		return nil
	}
	t, err := openNFT(hostportTable)
	if err != nil {
		return ignore(err, noNFT[:]...)
	}
	defer t.close()
	var own []element
	for _, e := range elementsOf(ports, owner) {
		found, ok, err := t.get(e)
		if err != nil {
			return ignore(err, noNFT[:]...)
		}
		if ok && ownerHash(found.Comment) == ownerHash(owner) {
			own = append(own, element{Set: e.Set, Key: e.Key})
		}
	}
	return t.delete(own)
}

// CheckHostPorts returns nil when each port is forwarded to the pod and is the owner's, else an error with code 100.
func (n *Node) CheckHostPorts(owner string, ports []HostPort) error {
	t, err := openNFT(hostportTable)
	if err != nil {
		return err
	}
	defer t.close()
	for _, e := range elementsOf(ports, owner) {
		found, ok, err := t.get(e)
		switch {
		case err != nil:
			return err
		case !ok:
			return plugin.Errorf(plugin.CodeStateDiffers, "hostPort %s: its entry in nftables set %s is missing", keyText(e), e.Set)
		case ownerHash(found.Comment) != ownerHash(e.Comment):
			return plugin.Errorf(plugin.CodeStateDiffers, "hostPort %s: belongs to %s now", keyText(e), ownerText(found.Comment))
		case string(found.Value) != string(e.Value):
			return plugin.Errorf(plugin.CodeStateDiffers, "hostPort %s: leads elsewhere", keyText(e))
		}
	}
	return nil
}

func isExist(err error) bool { return errors.Is(err, unix.EEXIST) }
