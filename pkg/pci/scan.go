// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

const networkClass = 0x02

// Scan reads the network cards and NUMA nodes of a machine from sysfs. A read error makes a device Unreadable. Functions that
// disappear during the scan are skipped, and so are VFs whose PF did. An error means that sysfs or PCI is missing.
func Scan(sysfs string) (*Snapshot, error) {
	ask, err := openChannels()
	if err != nil {
		return nil, err
	}
	defer ask.Close()
	return scan(sysfs, ask.count)
}

// scanner is one scan.
type scanner struct {
	brief    bool // read only identity, interface and driver
	root     *os.Root
	channels func(ifname string, a Address) int
	files    []string // files of all RDMA devices
	devices  []Device
	indexes  map[pair]int // indexes of VFs, according to their PFs
}

type pair struct{ pf, vf Address }

func scan(sysfs string, channels func(string, Address) int) (*Snapshot, error) {
	root, err := os.OpenRoot(sysfs)
	if err != nil {
		return nil, fmt.Errorf("scan PCI devices: %w", err)
	}
	defer root.Close()
	names, err := listFolder(root, devicesFolder)
	if err != nil {
		return nil, fmt.Errorf("scan PCI devices of %s: %w", sysfs, err)
	}
	s := scanner{root: root, channels: channels, indexes: map[pair]int{}}
	if _, err := root.Lstat(miscFolder + "/rdma_cm"); err == nil {
		s.files = []string{"infiniband/rdma_cm"}
	}
	for _, name := range names {
		if a, err := ParseAddress(name); err == nil {
			s.add(a)
		}
	}
	return &Snapshot{Devices: s.join(), Nodes: scanNodes(root)}, nil
}

// add reads a function if it belongs to a network card.
func (s *scanner) add(a Address) {
	at := devicesFolder + "/" + a.String()
	f, err := openFolder(s.root, at)
	if err != nil {
		return // it has disappeared, or the link is dangling
	}
	defer f.Close()
	d := Device{Address: a, NUMANode: Unknown, IOMMUGroup: Unknown, VFIndex: Unknown}
	d.Class = value(f, "class", 0, parseClass)
	if d.Class>>16 != networkClass && (f.err == nil || !f.has("net") && !f.has("physfn")) {
		return
	}
	d.Driver = f.link("driver", "drivers")
	d.RDMA = f.list("infiniband")
	if !s.brief {
		target, err := s.root.Readlink(at)
		f.fail("link", err)
		d.Root = parseRoot(target)
		s.identify(&d, f)
		s.attach(&d, f)
	}
	s.divide(&d, f)
	s.addInterfaces(&d, f)
	if f.left {
		// The device may be gone, or only its interface, which may be in a pod.
		if _, err := s.root.Stat(at + "/vendor"); err != nil {
			return
		}
	}
	if f.err != nil {
		d.Unreadable = f.err.Error()
	}
	s.devices = append(s.devices, d)
}

func (s *scanner) identify(d *Device, f *folder) {
	d.Vendor = value(f, "vendor", "", parseID)
	d.Product = value(f, "device", "", parseID)
	d.NUMANode = value(f, "numa_node", Unknown, parseNode)
	d.ACPIIndex = f.text("acpi_index")
	for _, name := range []string{"aer_dev_fatal", "aer_dev_nonfatal"} {
		d.Errors += value(f, name, 0, parseErrors)
	}
}

// attach reads further properties: the IOMMU group, UIO, and the device files of RDMA.
func (s *scanner) attach(d *Device, f *folder) {
	if group := f.link("iommu_group", "iommu_groups"); group != "" {
		n, err := parseNode(group)
		f.fail("iommu_group", err)
		// Only a group that VFIO made has a name.
		name, err := readAttribute(s.root, groupsFolder+"/"+group+"/name")
		if err != nil && !isUnavailable(err) {
			f.fail("iommu_group", err)
		}
		d.IOMMUGroup, d.NoIOMMU = n, name == "vfio-noiommu"
	}
	d.UIO = f.list("uio")
	for _, name := range slices.Concat(f.list("infiniband_verbs"), f.list("infiniband_mad")) {
		d.RDMAFiles = append(d.RDMAFiles, "infiniband/"+name)
	}
	if len(d.RDMA) > 0 {
		d.RDMAFiles = append(d.RDMAFiles, s.files...)
	}
	slices.Sort(d.RDMAFiles)
}

// divide reads the relation of PF and VFs.
func (s *scanner) divide(d *Device, f *folder) {
	if d.PF = f.function("physfn"); d.PF == d.Address {
		d.PF = Address{}
		f.fail("physfn", errLink)
	}
	if !s.brief {
		d.TotalVFs = value(f, "sriov_totalvfs", 0, parseCount)
		d.NumVFs = value(f, "sriov_numvfs", 0, parseCount)
	}
	for _, name := range f.names {
		if !strings.HasPrefix(name, "virtfn") {
			continue
		}
		// A dangling link counts as missing: the VF's own link names its PF.
		target, err := readLink(f.Root, name, "")
		vf, addressErr := ParseAddress(target)
		if index, ok := parseVF(name); ok && err == nil && addressErr == nil {
			s.indexes[pair{d.Address, vf}] = index
		}
	}
}

// join combines the functions into one list, sorted by address.
func (s *scanner) join() []Device {
	physical := map[Address]Device{}
	for i := range s.devices {
		if d := &s.devices[i]; !d.IsVF() {
			if !s.brief {
				d.NumVFs = max(d.NumVFs, s.countVFs(d.Address))
			}
			physical[d.Address] = *d
		}
	}
	devices := []Device{}
	for _, d := range s.devices {
		if d.IsVF() {
			pf, ok := physical[d.PF]
			if !ok {
				continue
			}
			if index, ok := s.indexes[pair{d.PF, d.Address}]; ok {
				d.VFIndex = index
			}
			if d.LinkType == "" {
				d.LinkType = pf.LinkType
			}
		}
		devices = append(devices, d)
	}
	slices.SortFunc(devices, func(a, b Device) int { return a.Address.Compare(b.Address) })
	return devices
}

// countVFs counts the VFs of a PF by the links in both directions. The kernel creates VFs before sriov_numvfs shows it.
func (s *scanner) countVFs(pf Address) int {
	links, vfs := 0, 0
	for of := range s.indexes {
		if of.pf == pf {
			links++
		}
	}
	for _, d := range s.devices {
		if d.PF == pf {
			vfs++
		}
	}
	return max(links, vfs)
}
