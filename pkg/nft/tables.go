// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Table is one of Podlace's nftables tables.
type Table struct {
	family nftables.TableFamily
	Name   string
}

// String returns the family and the name of the table, as in nft(8).
func (t Table) String() string {
	if t.family == nftables.TableFamilyBridge {
		return "bridge " + t.Name
	}
	return "inet " + t.Name
}

// matches() reports whether a table of the kernel has the same name and family as t.
func (t Table) matches(table *nftables.Table) bool {
	return t.Name == table.Name && t.family == table.Family
}

// Netlink converts the table to the type of the library google/nftables.
func (t Table) Netlink() *nftables.Table { return &nftables.Table{Name: t.Name, Family: t.family} }

// These constants are the names of the registered tables. The comment after each name is the package that owns the table.
const (
	MasqueradeTable = "podlace_masquerade" // bridge
	GuardTable      = "podlace_guard"      // bridge
	VLANTable       = "podlace_vlan"       // bridge
	HostportTable   = "podlace_hostport"   // portmap
	LoopbackTable   = "podlace_loopback"   // portmap
)

// Tables returns the registry of all nftables tables of Podlace. Podlace can create only tables in this registry, because all code gets its
// table from the registry. A rollback deletes all tables in the registry.
func Tables() []Table {
	return []Table{
		{nftables.TableFamilyINet, MasqueradeTable},
		{nftables.TableFamilyINet, HostportTable},
		{nftables.TableFamilyINet, VLANTable},
		{nftables.TableFamilyBridge, GuardTable},
		// The rules in LoopbackTable protect 127.0.0.0/8. LoopbackTable is the last entry, because a rollback must delete it after all tables
		// that need its protection.
		{nftables.TableFamilyINet, LoopbackTable},
	}
}

// TableOf returns the registered table with the given name. An unregistered name is a bug in the caller, so TableOf panics.
func TableOf(name string) Table {
	tables := Tables()
	return tables[slices.IndexFunc(tables, func(t Table) bool { return t.Name == name })]
}

// Own returns those of Podlace's tables that exist in the kernel.
func Own() (found []Table, err error) {
	c, err := New()
	if err != nil {
		return nil, err
	}
	has, err := c.ListTables()
	if err := IgnoreUnsupported(err); err != nil {
		return nil, err
	}
	for _, own := range Tables() {
		if slices.ContainsFunc(has, own.matches) {
			found = append(found, own)
		}
	}
	return found, nil
}

// HasTable reports whether the registered table with the given name exists in the kernel.
func HasTable(name string) (bool, error) {
	own := TableOf(name)
	c, err := New()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(own.family)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == own.Name }), IgnoreUnsupported(err)
}

// DelTable deletes a table with all its chains, sets and rules. DelTable is a no-op if the table is missing.
func DelTable(t Table) error {
	err := Build("nft delete table "+t.String(), func(c *nftables.Conn) error {
		c.DelTable(t.Netlink())
		return nil
	})
	return IgnoreUnsupported(fault.Ignore(err, unix.ENOENT))
}
