// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"io"
	"net"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	maxPacket = 512     // bytes of an answer over UDP to a client that announces no size
	maxStream = 1 << 16 // bytes of an answer over TCP
	idle      = 30 * time.Second
)

// serveStream answers the questions of one TCP connection. A message follows its length in both directions.
func serveStream(conn net.Conn, z dnsZone) {
	defer conn.Close()
	for {
		var length [2]byte
		if err := conn.SetDeadline(time.Now().Add(idle)); err != nil {
			return
		}
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(conn, query); err != nil {
			return
		}
		reply := z.replyTo(query, maxStream-1)
		if reply == nil {
			return
		}
		if _, err := conn.Write(binary.BigEndian.AppendUint16(nil, uint16(len(reply)))); err != nil { //nolint:gosec // at most maxStream-1
			return
		}
		if _, err := conn.Write(reply); err != nil {
			return
		}
	}
}

// replyTo returns the answer to a query with one question, or nil if it is invalid or itself a response. An answer above the limit is only
// a header with the TC (truncated) bit, after which the client retries over TCP.
func (z dnsZone) replyTo(query []byte, limit int) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil || header.Response {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	message := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: header.ID, Response: true, Authoritative: true, RecursionDesired: header.RecursionDesired},
		Questions: []dnsmessage.Question{question},
	}
	message.Answers, message.RCode = z.answerQuestion(question)
	packed, err := message.Pack()
	if err == nil && len(packed) > limit {
		message.Answers, message.Truncated = nil, true
		packed, err = message.Pack()
	}
	if err != nil {
		return nil
	}
	return packed
}
