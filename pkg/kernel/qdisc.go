// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// qdisc is a queueing discipline of a link (tc(8)).
type qdisc struct {
	link           int
	handle, parent uint32
	kind           string
	options        []byte
	Counters
}

func (q qdisc) send(n *NS, verb, flags int, options ...*nl.RtAttr) ([][]byte, error) {
	if q.kind != "" {
		options = append([]*nl.RtAttr{nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(q.kind))}, options...)
	}
	header := &nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(q.link), Handle: q.handle, Parent: q.parent}
	return n.send(verb, flags|unix.NLM_F_ACK, header, options...)
}

func (q qdisc) replace(n *NS, options ...*nl.RtAttr) error {
	_, err := q.send(n, unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, nested(nl.TCA_OPTIONS, options...))
	return err
}

// del deletes the qdisc. It is a no-op if the qdisc is missing.
func (q qdisc) del(n *NS) error {
	_, err := q.send(n, unix.RTM_DELQDISC, 0)
	return fault.Ignore(err, unix.ENOENT, unix.EINVAL, unix.ENODEV)
}

// qdiscAt returns the qdisc of a link below the parent handle. ok is false if there is none. Without NLM_F_ECHO, the kernel would reply
// only to subscribers of the multicast group.
func (n *NS) qdiscAt(link Link, parent uint32) (q qdisc, ok bool, err error) {
	replies, err := qdisc{link: link.Index, parent: parent}.send(n, unix.RTM_GETQDISC, unix.NLM_F_ECHO)
	err = fault.Ignore(err, unix.ENOENT, unix.EINVAL, unix.ENODEV)
	if err != nil || len(replies) == 0 {
		return qdisc{}, false, wrapped("qdisc show dev "+link.Name, err)
	}
	q, err = parseQdisc(replies[0])
	return q, err == nil, err
}

// qdiscs returns the qdiscs of all links in one request.
func (n *NS) qdiscs() (list []qdisc, err error) {
	replies, err := n.listObjects(unix.RTM_GETQDISC, &nl.TcMsg{Family: nl.FAMILY_ALL})
	if err != nil {
		return nil, wrapped("qdisc show", err)
	}
	for _, reply := range replies {
		q, err := parseQdisc(reply)
		if err != nil {
			return nil, err
		}
		list = append(list, q)
	}
	return list, nil
}

// parseQdisc parses the kernel's message about a qdisc (linux/rtnetlink.h, linux/gen_stats.h).
func parseQdisc(reply []byte) (q qdisc, err error) {
	if len(reply) < nl.SizeofTcMsg {
		return q, errors.New("qdisc: the kernel's answer is too short")
	}
	msg := nl.DeserializeTcMsg(reply)
	q = qdisc{link: int(msg.Ifindex), handle: msg.Handle, parent: msg.Parent}
	attrs, err := nl.ParseRouteAttr(reply[msg.Len():])
	for _, a := range attrs {
		switch a.Attr.Type {
		case nl.TCA_KIND:
			q.kind = nl.BytesToString(a.Value)
		case nl.TCA_OPTIONS:
			q.options = a.Value
		case nl.TCA_STATS2:
			if err := q.count(a.Value); err != nil {
				return q, err
			}
		}
	}
	return q, wrapped("qdisc", err)
}

func (q *qdisc) count(stats []byte) error {
	attrs, err := nl.ParseRouteAttr(stats)
	for _, a := range attrs {
		switch {
		case a.Attr.Type == nl.TCA_STATS_BASIC && len(a.Value) >= 8:
			q.Sent = binary.NativeEndian.Uint64(a.Value)
		case a.Attr.Type == nl.TCA_STATS_QUEUE && len(a.Value) >= 12:
			q.Waiting, q.Dropped = binary.NativeEndian.Uint32(a.Value[4:]), binary.NativeEndian.Uint32(a.Value[8:])
		}
	}
	return wrapped("statistics of a qdisc", err)
}

func wrapped(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, err)
}
