// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"golang.org/x/sys/unix"
)

type collector struct {
	scope   string
	records []record
	links   map[uint32]link // by index
}

func (c *collector) collect(conntrack bool) error {
	route, err := dial(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer route.close()
	filter, err := dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer filter.close()

	for _, part := range []func(*socket) error{
		c.collectLinks, c.collectAddresses, c.collectRoutes, c.collectRules, c.collectNexthops,
		c.collectNeighbours, c.collectBridges, c.collectTC,
	} {
		if err := part(route); err != nil {
			return err
		}
	}
	if err := c.collectNft(filter); err != nil {
		return err
	}
	if conntrack {
		if err := c.collectConntrack(filter); err != nil {
			return err
		}
	}
	if err := c.collectSysctls(); err != nil {
		return err
	}
	return c.collectIptables()
}

func (c *collector) add(name string, fields ...field) {
	c.records = append(c.records, record{scope: c.scope, name: name, fields: fields})
}

// addList adds a list whose order is significant, one record for each line. Diff thus reports an added line alone, and a change of order as
// such.
func (c *collector) addList(prefix string, lines []string) {
	for _, line := range lines {
		c.add(prefix + " " + line)
	}
	if len(lines) > 1 {
		sum := sha256.Sum256([]byte(strings.Join(lines, "\n")))
		c.records = append(c.records, record{
			scope:  c.scope,
			name:   "order of " + prefix,
			fields: []field{{"hash", hex.EncodeToString(sum[:6])}},
			owner:  prefix + " ",
		})
	}
}

func (c *collector) linkName(index uint32) string {
	if l, ok := c.links[index]; ok {
		return l.name
	}
	return "unknown link" // in another namespace, or just deleted
}
