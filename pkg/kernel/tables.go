// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Table is an nftables table that Podlace makes.
type Table struct {
	family nftables.TableFamily
	Name   string
}

// String returns family and name, as nft(8) takes them.
func (t Table) String() string {
	if t.family == nftables.TableFamilyBridge {
		return "bridge " + t.Name
	}
	return "inet " + t.Name
}

func (t Table) netlink() *nftables.Table { return &nftables.Table{Name: t.Name, Family: t.family} }

// Tables is the registry of all nftables tables that Podlace makes. The builders get their tables from here, so that a table that is not
// listed cannot be made, and rollback deletes what is listed.
func Tables() []Table {
	return []Table{
		{nftables.TableFamilyINet, masqueradeTable},
		{nftables.TableFamilyINet, hostportTable},
		{nftables.TableFamilyINet, vlanTable},
		{nftables.TableFamilyBridge, guardTable},
		// The protection of 127.0.0.0/8 goes after all that needs it.
		{nftables.TableFamilyINet, loopbackTable},
	}
}

// tableOf returns the registered table with a name. Another name is a defect of the caller.
func tableOf(name string) Table {
	tables := Tables()
	return tables[slices.IndexFunc(tables, func(t Table) bool { return t.Name == name })]
}

// OwnTables returns the registered tables that the kernel has.
func (n *Node) OwnTables() (found []Table, err error) {
	c, err := newNFT()
	if err != nil {
		return nil, err
	}
	has, err := c.ListTables()
	if err := ignoreNoNFT(err); err != nil {
		return nil, err
	}
	for _, own := range Tables() {
		if slices.ContainsFunc(has, func(t *nftables.Table) bool { return t.Name == own.Name && t.Family == own.family }) {
			found = append(found, own)
		}
	}
	return found, nil
}

// hasTable reports whether the kernel has the registered table with a name.
func hasTable(name string) (bool, error) {
	own := tableOf(name)
	c, err := newNFT()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(own.family)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == own.Name }), ignoreNoNFT(err)
}

// DelTable deletes a table with its content; it is a no-op if the table is missing.
func (n *Node) DelTable(t Table) error {
	err := skeleton("nft delete table "+t.String(), func(c *nftables.Conn) error {
		c.DelTable(t.netlink())
		return nil
	})
	return ignoreNoNFT(fault.Ignore(err, unix.ENOENT))
}
