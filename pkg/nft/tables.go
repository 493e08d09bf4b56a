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

// String returns family and name of the table, as in nft(8).
func (t Table) String() string {
	if t.family == nftables.TableFamilyBridge {
		return "bridge " + t.Name
	}
	return "inet " + t.Name
}

func (t Table) matches(table *nftables.Table) bool {
	return t.Name == table.Name && t.family == table.Family
}

// Netlink returns the table as google/nftables needs it.
func (t Table) Netlink() *nftables.Table { return &nftables.Table{Name: t.Name, Family: t.family} }

// Names of the tables, each with the package that owns it.
const (
	MasqueradeTable = "podlace_masquerade" // bridge
	GuardTable      = "podlace_guard"      // bridge
	VLANTable       = "podlace_vlan"       // bridge
	HostportTable   = "podlace_hostport"   // portmap
	LoopbackTable   = "podlace_loopback"   // portmap
)

// Tables returns all of Podlace's tables, in the order in which a rollback deletes them.
func Tables() []Table {
	return []Table{
		{nftables.TableFamilyINet, MasqueradeTable},
		{nftables.TableFamilyINet, HostportTable},
		{nftables.TableFamilyINet, VLANTable},
		{nftables.TableFamilyBridge, GuardTable},
		// It protects 127.0.0.0/8, so it must outlive all tables that need this protection.
		{nftables.TableFamilyINet, LoopbackTable},
	}
}

// TableOf returns the table with the given name. It panics if there is none, which is a bug in the caller.
func TableOf(name string) Table {
	tables := Tables()
	return tables[slices.IndexFunc(tables, func(t Table) bool { return t.Name == name })]
}

// Own returns those of Podlace's tables that the kernel has.
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

// HasTable reports whether the registered table exists in the kernel.
func HasTable(name string) (bool, error) {
	own := TableOf(name)
	c, err := New()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(own.family)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == own.Name }), IgnoreUnsupported(err)
}

// DelTable deletes a table with its chains, sets and rules. It is a no-op if the table is missing.
func DelTable(t Table) error {
	err := Build("nft delete table "+t.String(), func(c *nftables.Conn) error {
		c.DelTable(t.Netlink())
		return nil
	})
	return IgnoreUnsupported(fault.Ignore(err, unix.ENOENT))
}
