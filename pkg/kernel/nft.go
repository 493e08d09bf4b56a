// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// NoNFT tells whether an error says that the kernel has no nf_tables.
func NoNFT(err error) bool {
	return noFamily(err) || errors.Is(err, unix.EINVAL) && !HasNFT() // which has other meanings too
}

func noFamily(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
}

// HasNFT asks nf_tables for its generation: where there is none, nfnetlink answers EINVAL. What keeps one from asking is no answer.
func HasNFT() bool {
	t, err := openNFT("")
	if err == nil {
		defer t.close()
		_, err = t.conn.ask(mdl.Message{
			Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN), Flags: mdl.Request},
			Data:   []byte{unix.NFPROTO_UNSPEC, 0, 0, 0},
		})
	}
	return !noFamily(err) && !errors.Is(err, unix.EINVAL)
}

// ignoreNoNFT is for what there is nothing of on a kernel without nf_tables.
func ignoreNoNFT(err error) error {
	if NoNFT(err) {
		return nil
	}
	return err
}

// nftTimeout bounds one answer of the kernel; transactions take microseconds.
const nftTimeout = 10 * time.Second

// nft is a socket to nf_tables that works on the elements of one table. It does what google/nftables lacks: adding
// exclusively, and getting one element by its key. Tables, chains and rules, made once a node, go through google/nftables.
type nft struct {
	conn   *nftSocket
	family byte
	table  string
}

// nftSocket may have unread answers after an error, for the next question to take for its own. Then it is spoilt.
type nftSocket struct {
	*mdl.Conn
	spoilt bool
}

// ask sends a question of one message and returns its answers. unix.ENOENT: there are none.
func (s *nftSocket) ask(question mdl.Message) ([]mdl.Message, error) {
	s.begin()
	answers, err := s.Execute(question)
	s.spoilt = fault.Ignore(err, unix.ENOENT) != nil
	return answers, err
}

// begin is called before something is sent. Until all answers are read, the socket is spoilt.
func (s *nftSocket) begin() {
	s.spoilt = true
	_ = s.SetDeadline(time.Now().Add(nftTimeout))
}

func openNFT(table string) (*nft, error) { return openFamily(unix.NFPROTO_INET, table) }

// openNFT opens a table on the node's socket to nf_tables, which Close closes.
func (n *Node) openNFT(table string) (*nft, error) {
	if n.nft != nil && n.nft.spoilt {
		n.nft.Close()
		n.nft = nil
	}
	if n.nft == nil {
		t, err := openNFT(table)
		if err != nil {
			return nil, err
		}
		n.nft = t.conn
	}
	return &nft{n.nft, unix.NFPROTO_INET, table}, nil
}

func openFamily(family byte, table string) (*nft, error) {
	conn, err := mdl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open nftables socket: %w", err)
	}
	return &nft{&nftSocket{Conn: conn}, family, table}, nil
}

// close may wait some milliseconds: after a delete the kernel frees memory only when nobody reads it any more (RCU), and closing
// waits for that.
func (t *nft) close() { t.conn.Close() }

// get returns the element with the key of e, or the interval that it is in; ok is false when the element, the set or the table is missing.
func (t *nft) get(e element) (found element, ok bool, err error) {
	all, err := t.find([]element{e})
	if err != nil || all[0] == nil {
		return element{}, false, err
	}
	return *all[0], true, nil
}

// maxQuestions is how many elements are asked for at a time: the answers must fit the socket's buffer.
const maxQuestions = 64

// find returns for each element what get does, nil where there is none.
func (t *nft) find(elements []element) ([]*element, error) {
	found := make([]*element, 0, len(elements))
	for chunk := range slices.Chunk(elements, maxQuestions) {
		var ask []mdl.Message
		for _, e := range chunk {
			msg, err := t.message(unix.NFT_MSG_GETSETELEM, 0, e.Set, []element{{Key: e.Key}})
			if err != nil {
				return nil, err
			}
			ask = append(ask, msg)
		}
		t.conn.begin()
		if _, err := t.conn.SendMessages(ask); err != nil {
			return nil, fmt.Errorf("nft get elements of %s: %w", t.table, err)
		}
		for _, e := range chunk {
			replies, err := t.conn.Receive() // one for each question, or an error
			if err := fault.Ignore(err, unix.ENOENT); err != nil {
				return nil, fmt.Errorf("nft get element %s %s: %w", t.table, e.Set, err)
			}
			var one *element
			for _, reply := range replies {
				for _, got := range parseElements(reply.Data) {
					got.Set = e.Set
					one = &got
				}
			}
			found = append(found, one)
		}
		t.conn.spoilt = false
	}
	return found, nil
}

// list returns all elements of a set; those of a missing one are none.
func (t *nft) list(set string) ([]element, error) {
	msg, err := t.message(unix.NFT_MSG_GETSETELEM, mdl.Dump, set, nil)
	if err != nil {
		return nil, err
	}
	var all []element
	err = t.dump(msg, func(data []byte) {
		for _, e := range parseElements(data) {
			e.Set = set
			all = append(all, e)
		}
	})
	return all, err
}

// dump calls each for the body of every answer. It begins again when something changed meanwhile.
func (t *nft) dump(ask mdl.Message, each func(data []byte)) error {
	var replies []mdl.Message
	err := fault.Retry(func() (err error) {
		replies, err = t.conn.ask(ask)
		return err
	})
	if err := fault.Ignore(err, unix.ENOENT); err != nil {
		return fmt.Errorf("nft list %s: %w", t.table, err)
	}
	for _, reply := range replies {
		each(reply.Data)
	}
	return nil
}

// countRules counts the rules of the table.
func (t *nft) countRules() (n int, err error) {
	ask, err := t.tableMessage(unix.NFT_MSG_GETRULE, mdl.Dump, t.table)
	if err != nil {
		return 0, err
	}
	return n, t.dump(ask, func([]byte) { n++ })
}

// tableMessage names a table alone: its attribute has the same number in all kinds of messages (NFTA_TABLE_NAME, NFTA_RULE_TABLE).
func (t *nft) tableMessage(kind int, flags mdl.HeaderFlags, table string) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.String(unix.NFTA_TABLE_NAME, table)
	data, err := enc.Encode()
	return mdl.Message{
		Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdl.Request | flags},
		Data:   append([]byte{t.family, 0, 0, 0}, data...),
	}, err
}

// add puts the elements in, all or none. unix.EEXIST: one of the keys is there already; unix.ENOENT: the table is missing.
func (t *nft) add(elements []element) error {
	return t.apply(fmt.Sprintf("nft add %d elements to %s", len(elements), t.table), edit{kind: unix.NFT_MSG_NEWSETELEM, flags: mdl.Create | mdl.Excl, elements: elements})
}

// existing returns those of the elements that are there, as it finds them.
func (t *nft) existing(elements []element) (found []element, err error) {
	all, err := t.find(elements)
	for _, e := range all {
		if e != nil {
			found = append(found, *e)
		}
	}
	return found, err
}

// delete takes the elements out, all or none. unix.ENOENT: one is missing.
func (t *nft) delete(elements []element) error {
	return t.apply(fmt.Sprintf("nft delete %d elements of %s", len(elements), t.table), edit{kind: unix.NFT_MSG_DELSETELEM, elements: elements})
}

// replace takes the elements old out and puts the elements in, all or none.
func (t *nft) replace(old, elements []element) error {
	return t.apply(fmt.Sprintf("nft replace %d elements of %s", len(elements), t.table),
		edit{kind: unix.NFT_MSG_DELSETELEM, elements: old}, edit{kind: unix.NFT_MSG_NEWSETELEM, flags: mdl.Create | mdl.Excl, elements: elements})
}

// edit is one step of a transaction.
type edit struct {
	kind     int
	flags    mdl.HeaderFlags
	elements []element
	table    string // for what is about a whole table
}

func (t *nft) apply(op string, edits ...edit) error {
	batch := []mdl.Message{batchMark(unix.NFNL_MSG_BATCH_BEGIN)}
	for _, e := range edits {
		if e.table != "" {
			msg, err := t.tableMessage(e.kind, mdl.Acknowledge, e.table)
			if err != nil {
				return err
			}
			batch = append(batch, msg)
		}
		for _, group := range bySet(e.elements) {
			msg, err := t.message(e.kind, e.flags|mdl.Acknowledge, group[0].Set, group)
			if err != nil {
				return err
			}
			batch = append(batch, msg)
		}
	}
	if len(batch) == 1 {
		return nil
	}
	batch = append(batch, batchMark(unix.NFNL_MSG_BATCH_END))
	return fault.Change(op, func() error { return t.send(batch) })
}

// send sends a transaction and reads one acknowledgement for each message between its marks.
func (t *nft) send(batch []mdl.Message) error {
	t.conn.begin()
	if len(batch) > 6 {
		_ = t.conn.SetWriteBuffer(len(batch) << 17)          // a transaction is one datagram
		_ = t.conn.SetReadBuffer(max(len(batch)<<11, 1<<18)) // each message has an answer
		_ = t.conn.SetOption(mdl.CapAcknowledge, true)       // errors would repeat the message, and overrun the socket
	}
	if _, err := t.conn.SendMessages(batch); err != nil {
		return err
	}
	var first error
	for range len(batch) - 2 {
		_, err := t.conn.Receive()
		if first == nil {
			first = err
		}
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOBUFS) {
			break // the kernel answers the whole batch with one error
		}
	}
	t.conn.spoilt = first != nil
	return first
}

// maxElements is how many elements one message holds: together with their comments they must fit an attribute of 64 KiB.
const maxElements = 200

func bySet(elements []element) [][]element {
	var groups [][]element
	at := map[string]int{}
	for _, e := range elements {
		i, ok := at[e.Set]
		if !ok || len(groups[i]) == maxElements {
			i = len(groups)
			at[e.Set] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], e)
	}
	return groups
}

func batchMark(kind int) mdl.Message {
	// struct nfgenmsg: family, version, res_id (big endian).
	return mdl.Message{Header: mdl.Header{Type: mdl.HeaderType(kind), Flags: mdl.Request}, Data: []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}}
}

func (t *nft) message(kind int, flags mdl.HeaderFlags, set string, elements []element) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.ByteOrder = binary.BigEndian
	enc.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.table)
	enc.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	if len(elements) > 0 {
		enc.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, listOf(elements))
	}
	data, err := enc.Encode()
	if err != nil {
		return mdl.Message{}, fmt.Errorf("encode nftables elements: %w", err)
	}
	return mdl.Message{
		Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdl.Request | flags},
		Data:   append([]byte{t.family, 0, 0, 0}, data...),
	}, nil
}

// skeleton makes tables, chains, sets and rules in one transaction. All that it adds may be there already.
func skeleton(op string, build func(*nftables.Conn) error) error {
	conn, err := newNFT(nftables.AsLasting())
	if err != nil {
		return fmt.Errorf("open nftables socket: %w", err)
	}
	defer func() { _ = conn.CloseLasting() }()
	return fault.Change(op, func() error {
		if err := build(conn); err != nil {
			return err
		}
		return conn.Flush()
	})
}

// newNFT is nftables.New whose answers do not take for ever: one that the kernel dropped for want of memory never comes.
func newNFT(options ...nftables.ConnOption) (*nftables.Conn, error) {
	return nftables.New(append(options, nftables.WithSockOptions(func(c *mdl.Conn) error { return c.SetDeadline(time.Now().Add(nftTimeout)) }))...)
}
