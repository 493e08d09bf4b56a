// SPDX-License-Identifier: Apache-2.0

// Package nft reads and changes nf_tables: elements and rules in transactions, and the schema version of a table. It also registers
// Podlace's tables, each of which belongs to one plugin that defines the content.
package nft

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

// Unsupported reports whether err means that the kernel has no nf_tables.
func Unsupported(err error) bool {
	return noFamily(err) || errors.Is(err, unix.EINVAL) && !Available() // EINVAL has other meanings too
}

func noFamily(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)
}

// Available reports whether the kernel has nf_tables. It asks for the generation ID of the ruleset; a kernel without nf_tables replies with
// EINVAL. Any other error counts as available.
func Available() bool {
	t, err := Open("")
	if err == nil {
		defer t.Close()
		_, err = t.query(mdl.Message{
			Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN), Flags: mdl.Request},
			Data:   []byte{unix.NFPROTO_UNSPEC, 0, 0, 0},
		})
	}
	return !noFamily(err) && !errors.Is(err, unix.EINVAL)
}

// IgnoreUnsupported returns err, or nil if it means that the kernel has no nf_tables and so nothing to clean up.
func IgnoreUnsupported(err error) error {
	if Unsupported(err) {
		return nil
	}
	return err
}

// replyTimeout limits the wait for one reply, which usually takes microseconds.
const replyTimeout = 10 * time.Second

// Conn is a netlink connection to nf_tables, which opens with the first request. Its zero value is ready to use.
type Conn struct {
	sock *mdl.Conn
	// needsReopen is set while the socket may contain unread replies, which the next request would take for its own.
	needsReopen bool
}

// Open returns a Handle for a registered table on this connection, or one without a table if the name is empty.
func (c *Conn) Open(table string) (*Handle, error) {
	if c.needsReopen {
		c.Close()
	}
	if c.sock == nil {
		sock, err := mdl.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return nil, fmt.Errorf("open nftables socket: %w", err)
		}
		c.sock = sock
	}
	family := byte(unix.NFPROTO_INET)
	if table != "" {
		family = byte(TableOf(table).family)
	}
	return &Handle{c, family, table}, nil
}

// Close closes the connection. After a deletion this takes some milliseconds, because the kernel waits for an RCU grace period.
func (c *Conn) Close() {
	if c.sock != nil {
		c.sock.Close()
	}
	*c = Conn{}
}

// query sends one message and returns the replies, or unix.ENOENT if the requested object does not exist.
func (c *Conn) query(question mdl.Message) ([]mdl.Message, error) {
	c.beginRequest()
	answers, err := c.sock.Execute(question)
	c.needsReopen = fault.Ignore(err, unix.ENOENT) != nil
	return answers, err
}

// beginRequest sets the timeout and needsReopen, which the caller resets once it has read all replies.
func (c *Conn) beginRequest() {
	c.needsReopen = true
	_ = c.sock.SetDeadline(time.Now().Add(replyTimeout))
}

// Handle accesses the elements of one table. It can do what google/nftables, which writes the static tables, chains and rules, cannot: look
// up an element by its key, and add one only if the key is missing.
type Handle struct {
	*Conn
	family byte
	Table  string // name of the table
}

// Open returns a Handle for a registered table on a new connection, which the caller must close.
func Open(table string) (*Handle, error) { return new(Conn).Open(table) }

// Get returns the element with the key of e, or the interval that contains the key. ok is false if the element, set or table is missing.
func (t *Handle) Get(e Element) (found Element, ok bool, err error) {
	all, err := t.Find([]Element{e})
	if err != nil || all[0] == nil {
		return Element{}, false, err
	}
	return *all[0], true, nil
}

// maxLookups is the number of requests that Find sends before it reads replies, which must fit into the socket's buffer.
const maxLookups = 64

// Find returns for each element the kernel's one, or nil if it is missing.
func (t *Handle) Find(elements []Element) ([]*Element, error) {
	found := make([]*Element, 0, len(elements))
	for chunk := range slices.Chunk(elements, maxLookups) {
		var ask []mdl.Message
		for _, e := range chunk {
			msg, err := t.message(unix.NFT_MSG_GETSETELEM, 0, e.Set, []Element{{Key: e.Key}})
			if err != nil {
				return nil, err
			}
			ask = append(ask, msg)
		}
		t.beginRequest()
		if _, err := t.sock.SendMessages(ask); err != nil {
			return nil, fmt.Errorf("nft get elements of %s: %w", t.Table, err)
		}
		for _, e := range chunk {
			replies, err := t.sock.Receive() // one reply or error per element
			if err := fault.Ignore(err, unix.ENOENT); err != nil {
				return nil, fmt.Errorf("nft get element %s %s: %w", t.Table, e.Set, err)
			}
			var one *Element
			for _, reply := range replies {
				for _, got := range parseElements(reply.Data) {
					got.Set = e.Set
					one = &got
				}
			}
			found = append(found, one)
		}
		t.needsReopen = false
	}
	return found, nil
}

// List returns all elements of a set. It is empty if the set is missing.
func (t *Handle) List(set string) ([]Element, error) {
	msg, err := t.message(unix.NFT_MSG_GETSETELEM, mdl.Dump, set, nil)
	if err != nil {
		return nil, err
	}
	var all []Element
	err = t.dump(msg, func(data []byte) {
		for _, e := range parseElements(data) {
			e.Set = set
			all = append(all, e)
		}
	})
	return all, err
}

// dump sends a dump request and calls each with the body of every reply. It repeats the request if the ruleset changes meanwhile.
func (t *Handle) dump(ask mdl.Message, each func(data []byte)) error {
	var replies []mdl.Message
	err := fault.Retry(func() (err error) {
		replies, err = t.query(ask)
		return err
	})
	if err := fault.Ignore(err, unix.ENOENT); err != nil {
		return fmt.Errorf("nft list %s: %w", t.Table, err)
	}
	for _, reply := range replies {
		each(reply.Data)
	}
	return nil
}

func (t *Handle) countRules() (n int, err error) {
	ask, err := t.tableMessage(unix.NFT_MSG_GETRULE, mdl.Dump, t.Table)
	if err != nil {
		return 0, err
	}
	return n, t.dump(ask, func([]byte) { n++ })
}

// tableMessage returns a message with only a table's name, whose attribute is the same everywhere (NFTA_TABLE_NAME, NFTA_RULE_TABLE).
func (t *Handle) tableMessage(kind int, flags mdl.HeaderFlags, table string) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.String(unix.NFTA_TABLE_NAME, table)
	data, err := enc.Encode()
	return mdl.Message{
		Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdl.Request | flags},
		Data:   append([]byte{t.family, 0, 0, 0}, data...),
	}, err
}

// Add adds all elements or none. It returns unix.EEXIST if a key exists, and unix.ENOENT if the table or set is missing.
func (t *Handle) Add(elements []Element) error {
	return t.Apply(fmt.Sprintf("nft add %d elements to %s", len(elements), t.Table),
		Edit{Kind: unix.NFT_MSG_NEWSETELEM, Flags: mdl.Create | mdl.Excl, Elements: elements})
}

// Existing returns those of the given elements that exist, with the kernel's values and comments.
func (t *Handle) Existing(elements []Element) (found []Element, err error) {
	all, err := t.Find(elements)
	for _, e := range all {
		if e != nil {
			found = append(found, *e)
		}
	}
	return found, err
}

// Missing returns those of the given elements that do not exist.
func (t *Handle) Missing(elements []Element) (missing []Element, err error) {
	all, err := t.Find(elements)
	for i, e := range all {
		if e == nil {
			missing = append(missing, elements[i])
		}
	}
	return missing, err
}

// Delete deletes all elements or none, in one transaction. It returns unix.ENOENT if one is missing.
func (t *Handle) Delete(elements []Element) error {
	return t.Apply(fmt.Sprintf("nft delete %d elements of %s", len(elements), t.Table),
		Edit{Kind: unix.NFT_MSG_DELSETELEM, Elements: elements})
}

// Replace deletes old elements and adds new ones in one transaction.
func (t *Handle) Replace(old, elements []Element) error {
	return t.Apply(fmt.Sprintf("nft replace %d elements of %s", len(elements), t.Table),
		Edit{Kind: unix.NFT_MSG_DELSETELEM, Elements: old}, Edit{Kind: unix.NFT_MSG_NEWSETELEM, Flags: mdl.Create | mdl.Excl, Elements: elements})
}

// Edit is one change in an nf_tables transaction.
type Edit struct {
	Kind     int             // such as unix.NFT_MSG_NEWSETELEM
	Flags    mdl.HeaderFlags // in addition to those of a request
	Elements []Element
	Table    string // for a change of a whole table
}

// Apply applies all edits or none, in one transaction, which op describes for fault.Change and errors.
func (t *Handle) Apply(op string, edits ...Edit) error {
	batch := []mdl.Message{batchMark(unix.NFNL_MSG_BATCH_BEGIN)}
	for _, e := range edits {
		if e.Table != "" {
			msg, err := t.tableMessage(e.Kind, mdl.Acknowledge, e.Table)
			if err != nil {
				return err
			}
			batch = append(batch, msg)
		}
		for _, group := range bySet(e.Elements) {
			msg, err := t.message(e.Kind, e.Flags|mdl.Acknowledge, group[0].Set, group)
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
	return fault.Change(op, func() error { return t.sendBatch(batch) })
}

// sendBatch sends a transaction and reads an acknowledgement for each message, except the first and the last, which mark begin and end.
func (t *Handle) sendBatch(batch []mdl.Message) error {
	t.beginRequest()
	if len(batch) > 6 {
		_ = t.sock.SetWriteBuffer(len(batch) << 17)          // a transaction is one datagram
		_ = t.sock.SetReadBuffer(max(len(batch)<<11, 1<<18)) // the kernel replies to each message
		_ = t.sock.SetOption(mdl.CapAcknowledge, true)       // otherwise errors repeat the message and overflow the socket
	}
	if _, err := t.sock.SendMessages(batch); err != nil {
		return err
	}
	var first error
	for range len(batch) - 2 {
		_, err := t.sock.Receive()
		if first == nil {
			first = err
		}
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOBUFS) {
			break // the kernel answers the whole batch with one error
		}
	}
	t.needsReopen = first != nil
	return first
}

// maxElements limits the elements in one message. With their comments, they must fit into an attribute of 64 KiB.
const maxElements = 200

func bySet(elements []Element) [][]Element {
	var groups [][]Element
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
	// The data is struct nfgenmsg: address family, version, res_id (big endian).
	return mdl.Message{Header: mdl.Header{Type: mdl.HeaderType(kind), Flags: mdl.Request}, Data: []byte{0, 0, 0, unix.NFNL_SUBSYS_NFTABLES}}
}

func (t *Handle) message(kind int, flags mdl.HeaderFlags, set string, elements []Element) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.ByteOrder = binary.BigEndian
	enc.String(unix.NFTA_SET_ELEM_LIST_TABLE, t.Table)
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

// Build sends what build adds to a transaction. Tables, chains, sets and rules that already exist are no error.
func Build(op string, build func(*nftables.Conn) error) error {
	conn, err := New(nftables.AsLasting())
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

// Limits of a socket in bytes. A transaction is one datagram, with about 250 bytes per guarded pod, and each of its messages is answered.
const (
	maxTransaction = 32 << 20
	maxReplies     = 4 << 20
)

// New returns an nftables.Conn for large transactions. It has a timeout, because the kernel may drop a reply when memory is short, and the
// request would wait forever.
func New(options ...nftables.ConnOption) (*nftables.Conn, error) {
	bound := nftables.WithSockOptions(func(c *mdl.Conn) error {
		_ = c.SetWriteBuffer(maxTransaction) // an ordinary user gets less
		_ = c.SetReadBuffer(maxReplies)
		_ = c.SetOption(mdl.CapAcknowledge, true) // otherwise errors repeat the message
		return c.SetDeadline(time.Now().Add(replyTimeout))
	})
	return nftables.New(append(options, bound)...)
}
