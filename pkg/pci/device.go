// SPDX-License-Identifier: Apache-2.0

// Package pci reads the network cards of a machine from sysfs: physical functions (PF) and virtual functions (VF) with their NUMA
// nodes, drivers and other properties. It identifies a function by its PCI address, because its interface may be in a pod.
package pci

import (
	"slices"
	"strings"
)

// Unknown is the NUMANode, IOMMUGroup or VFIndex that the kernel does not report.
const Unknown = -1

// Link types by the hardware type of an interface (ARPHRD_*).
const (
	Ether      = "ether"
	InfiniBand = "infiniband"
)

// Device is a PCI function of class 02 (network controller): a PF, a VF, or a card without SR-IOV.
type Device struct {
	Address   Address `json:"address"`
	Vendor    string  `json:"vendor"` // four hexadecimal digits: 8086
	Product   string  `json:"product"`
	Class     uint32  `json:"class"`            // class, subclass and interface: 0x020000
	Driver    string  `json:"driver,omitempty"` // "" if no driver is bound
	NUMANode  int     `json:"numaNode"`         // or Unknown
	Root      string  `json:"root"`             // the root of its PCI hierarchy: pci0000:3a
	ACPIIndex string  `json:"acpiIndex,omitempty"`

	IOMMUGroup int  `json:"iommuGroup"`        // or Unknown
	NoIOMMU    bool `json:"noIOMMU,omitempty"` // the group is of VFIO's mode without IOMMU

	Interfaces []string `json:"interfaces,omitempty"` // in the reader's network namespace, sorted
	LinkType   string   `json:"linkType,omitempty"`   // Ether, InfiniBand or "" if unknown; a VF without an interface has that of its PF
	RDMA       []string `json:"rdma,omitempty"`       // RDMA devices: mlx5_0
	RDMAFiles  []string `json:"rdmaFiles,omitempty"`  // their files below /dev: infiniband/uverbs0
	UIO        []string `json:"uio,omitempty"`        // files below /dev: uio0

	// Of a VF.
	PF      Address `json:"pf,omitzero"` // the zero value for all others
	VFIndex int     `json:"vfIndex"`     // by the PF's virtfnN; Unknown for all others

	// Of a PF.
	SRIOV    bool `json:"-"`                  // its capability is there, even if it allows no VF
	TotalVFs int  `json:"totalVFs,omitempty"` // maximum number of VFs
	NumVFs   int  `json:"numVFs,omitempty"`   // number of existing VFs, even if sriov_numvfs does not count them yet

	// The fields below are set only if the function's interface is in this network namespace. For a VF whose interface is elsewhere,
	// use those of its PF.
	Carrier   bool     `json:"carrier,omitempty"`   // of one interface at least
	Down      []string `json:"down,omitempty"`      // interfaces without carrier
	SwitchID  string   `json:"switchID,omitempty"`  // phys_switch_id, which some drivers also report in legacy mode
	Switchdev bool     `json:"switchdev,omitempty"` // it has representors, which exist only in switchdev mode

	Errors uint64 `json:"errors,omitempty"` // fatal and non-fatal errors that PCI Express reported since boot (AER)

	// Unreadable is the name of an existing file that could not be read, with the reason, or "". Do not use a device with such a file.
	Unreadable string `json:"unreadable,omitempty"`
}

// IsVF reports whether the device is a VF whose PF is on this machine.
func (d Device) IsVF() bool { return d.PF.IsValid() }

// IsPF reports whether the device has the capability SR-IOV.
func (d Device) IsPF() bool { return d.SRIOV || d.TotalVFs > 0 || d.NumVFs > 0 }

// IsVirtio reports whether the device is a virtio card, of whose interfaces the kernel does not name the PCI function.
func (d Device) IsVirtio() bool { return strings.HasPrefix(d.Driver, "virtio") }

// HasNoPF reports whether the device is neither a VF nor a PF: a VF that a hypervisor passed through to this machine without its PF, which
// looks like a card without SR-IOV. The result of Read does not say it.
func (d Device) HasNoPF() bool { return !d.IsVF() && !d.IsPF() }

// IsUserspace reports whether a driver passes a function to a program in user space, so that it has no network interface.
func IsUserspace(driver string) bool {
	return slices.Contains([]string{"vfio-pci", "uio_pci_generic", "igb_uio"}, driver)
}

// Node is an online NUMA node.
type Node struct {
	ID       int    `json:"id"`
	CPUs     string `json:"cpus"`     // as in cpulist: 0-15,32-47
	Distance []int  `json:"distance"` // to each node, in the order of Snapshot.Nodes (ACPI SLIT: 10 is local)
}

// Snapshot is the immutable result of one scan.
type Snapshot struct {
	Devices []Device `json:"devices"`         // sorted by address
	Nodes   []Node   `json:"nodes"`           // online nodes, sorted by ID
	NoBus   bool     `json:"noBus,omitempty"` // the machine has no PCI bus

	// ExclusiveRDMA is the mode "netns exclusive" of the RDMA subsystem, in which an RDMA device is visible only in its namespace.
	ExclusiveRDMA bool `json:"exclusiveRDMA,omitempty"`
}

// Device returns the device with the given address.
func (s *Snapshot) Device(a Address) (Device, bool) {
	i, ok := slices.BinarySearchFunc(s.Devices, a, func(d Device, a Address) int { return d.Address.Compare(a) })
	if !ok {
		return Device{}, false
	}
	return s.Devices[i], true
}

// VFs returns the VFs of a PF, sorted by index.
func (s *Snapshot) VFs(pf Address) []Device {
	var vfs []Device
	for _, d := range s.Devices {
		if d.IsVF() && d.PF == pf {
			vfs = append(vfs, d)
		}
	}
	slices.SortFunc(vfs, func(a, b Device) int { return a.VFIndex - b.VFIndex })
	return vfs
}
