// SPDX-License-Identifier: Apache-2.0

package nft

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

// Netlink returns the table as google/nftables takes it.
func (t Table) Netlink() *nftables.Table { return &nftables.Table{Name: t.Name, Family: t.family} }

// The names of the registered tables, each with the package that owns it.
const (
	MasqueradeTable = "podlace_masquerade" // bridge
	GuardTable      = "podlace_guard"      // bridge
	VLANTable       = "podlace_vlan"       // bridge
	HostportTable   = "podlace_hostport"   // portmap
	LoopbackTable   = "podlace_loopback"   // portmap
)

// Tables is the registry of all nftables tables that Podlace makes. The builders get their tables from here, so that a table that is not
// listed cannot be made, and rollback deletes what is listed.
func Tables() []Table {
	return []Table{
		{nftables.TableFamilyINet, MasqueradeTable},
		{nftables.TableFamilyINet, HostportTable},
		{nftables.TableFamilyINet, VLANTable},
		{nftables.TableFamilyBridge, GuardTable},
		// The protection of 127.0.0.0/8 goes after all that needs it.
		{nftables.TableFamilyINet, LoopbackTable},
	}
}

// TableOf returns the registered table with a name. Another name is a defect of the caller.
func TableOf(name string) Table {
	tables := Tables()
	return tables[slices.IndexFunc(tables, func(t Table) bool { return t.Name == name })]
}

// Own returns the registered tables that the kernel has.
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
		if slices.ContainsFunc(has, func(t *nftables.Table) bool { return t.Name == own.Name && t.Family == own.family }) {
			found = append(found, own)
		}
	}
	return found, nil
}

// HasTable reports whether the kernel has the registered table with a name.
func HasTable(name string) (bool, error) {
	own := TableOf(name)
	c, err := New()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(own.family)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == own.Name }), IgnoreUnsupported(err)
}

// DelTable deletes a table with its content; it is a no-op if the table is missing.
func DelTable(t Table) error {
	err := Build("nft delete table "+t.String(), func(c *nftables.Conn) error {
		c.DelTable(t.Netlink())
		return nil
	})
	return IgnoreUnsupported(fault.Ignore(err, unix.ENOENT))
}
