// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

// An entry is the data that the index stores about an attachment.
type entry struct {
	plugin.Attachment
	Addresses []netip.Addr         `json:"addresses"`
	Written   map[netip.Addr]int64 `json:"written,omitempty"` // as lease.written
	Boot      string               `json:"boot"`              // boot in which the lease was made or first seen
	Netns     string               `json:"netns,omitempty"`   // CNI_NETNS of the ADD
	Pod       string               `json:"pod,omitempty"`
}

// matches() reports whether a lease file is still the file of a lease in the entry. A lease file with the same content is not always the
// same lease. Another program may have deleted the file and created an equal file for a new pod.
func (e entry) matches(addr netip.Addr, is lease) bool {
	written, ok := e.Written[addr]
	return ok && e.Attachment == is.of && written == is.written
}

// after() reports whether any lease of the entry was created later than a given time.
func (e entry) after(at time.Time) bool {
	for _, written := range e.Written {
		if written > at.UnixNano() {
			return true
		}
	}
	return false
}

// addLease adds a lease to the entry.
func (e *entry) addLease(addr netip.Addr, written int64) {
	if e.Written == nil {
		e.Written = map[netip.Addr]int64{}
	}
	e.Addresses, e.Written[addr] = append(e.Addresses, addr), written
}

// String describes the owner of an address for messages.
func (e entry) String() string {
	if e.ContainerID == "" {
		return "a file that cannot be read"
	}
	text := "container " + e.ContainerID
	if e.Pod != "" {
		text = "pod " + e.Pod + ", " + text
	}
	if e.IfName != "" {
		text += ", interface " + e.IfName
	}
	return text
}

// within() reports whether any address of the entry is in the set.
func (e entry) within(set RangeSet) bool {
	return slices.ContainsFunc(e.Addresses, func(addr netip.Addr) bool { _, in := set.find(addr); return in })
}

// A shard is a part of the lease index: a map from attachments to their entries.
type shard map[string]entry

// shardDocument is the JSON document in the file of a shard.
type shardDocument struct {
	Sum     uint32          `json:"sum"` // CRC-32 of entries
	Entries json.RawMessage `json:"entries"`
}

func entryKey(a plugin.Attachment) string { return a.ContainerID + "/" + a.IfName }

func shardName(a plugin.Attachment) string {
	sum := sha512.Sum512([]byte(entryKey(a)))
	return shardAt((int(sum[0])<<8 | int(sum[1])) % shards)
}

func shardAt(number int) string { return fmt.Sprintf("%03x", number) }

// isShard reports whether a file name is the name of a shard.
func isShard(name string) bool {
	number, err := strconv.ParseUint(name, 16, 16)
	return err == nil && number < shards && name == shardAt(int(number))
}

func parseShard(data []byte) (shard, error) {
	var doc shardDocument
	s := shard{}
	if json.Unmarshal(data, &doc) != nil || crc32.ChecksumIEEE(doc.Entries) != doc.Sum || json.Unmarshal(doc.Entries, &s) != nil {
		return nil, errDamaged
	}
	return s, nil
}

func (s shard) encode() ([]byte, error) {
	entries, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	return json.Marshal(shardDocument{crc32.ChecksumIEEE(entries), entries})
}
