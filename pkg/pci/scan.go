// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// PCI classes: network controllers, of which 0x0207 are InfiniBand.
const (
	networkClass    = 0x02
	infiniBandClass = 0x0207
)

// Scan reads the network cards and NUMA nodes of a machine from sysfs. A device with a file that it cannot read has the error in
// Unreadable. Functions that disappear during the scan are skipped, as are the VFs of such a PF. Scan fails only if sysfs is missing.
func Scan(sysfs string) (*Snapshot, error) {
	root, err := os.OpenRoot(sysfs)
	if err != nil {
		return nil, fmt.Errorf("scan PCI devices: %w", err)
	}
	defer root.Close()
	names, err := listFolder(root, devicesFolder)
	_, noSysfs := root.Stat("bus")
	if _, noBus := root.Stat("bus/pci"); err != nil && (noSysfs != nil || !errors.Is(noBus, os.ErrNotExist)) {
		return nil, fmt.Errorf("scan PCI devices of %s: %w", sysfs, err)
	}
	s := scanner{root: root, indexes: map[pair]int{}}
	if _, err := root.Lstat(miscFolder + "/rdma_cm"); err == nil {
		s.files = []string{"infiniband/rdma_cm"}
	}
	for _, name := range names {
		if a, err := ParseAddress(name); err == nil {
			s.addFunction(a)
		}
	}
	return &Snapshot{NoBus: err != nil, Devices: s.joinDevices(), Nodes: scanNodes(root), ExclusiveRDMA: exclusiveRDMA(sysfs)}, nil
}

// scanner is the state of one scan.
type scanner struct {
	brief   bool // read only identity, interface and driver
	root    *os.Root
	files   []string // files of all RDMA devices
	devices []Device
	indexes map[pair]int // indexes of VFs, according to their PFs
}

type pair struct{ pf, vf Address }

// addFunction reads a PCI function, and adds it to the result if it is a network card.
func (s *scanner) addFunction(a Address) {
	at := devicesFolder + "/" + a.String()
	f, err := openFolder(s.root, at)
	if err != nil {
		return // it has disappeared, or the link is dangling
	}
	defer f.Close()
	d := Device{Address: a, NUMANode: Unknown, IOMMUGroup: Unknown, VFIndex: Unknown}
	d.Class = parseAttribute(f, "class", 0, parseClass)
	if d.Class>>16 != networkClass && (f.err == nil || !f.has("net") && !f.has("physfn")) {
		return
	}
	if d.Class>>8 == infiniBandClass { // also without an interface
		d.LinkType = InfiniBand
	}
	d.Driver = f.linkTarget("driver", "drivers")
	d.RDMA = f.listNames("infiniband")
	if !s.brief {
		target, err := s.root.Readlink(at)
		f.noteError("link", err)
		d.Root = parseRoot(target)
		s.identify(&d, f)
		s.readDeviceFiles(&d, f)
	}
	s.readSRIOV(&d, f)
	s.addInterfaces(&d, f)
	if f.left {
		// A file has disappeared with the whole device, or with its interface alone, for example into a pod.
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
	d.Vendor = parseAttribute(f, "vendor", "", parseID)
	d.Product = parseAttribute(f, "device", "", parseID)
	d.NUMANode = parseAttribute(f, "numa_node", Unknown, parseNode)
	d.ACPIIndex = f.text("acpi_index")
	for _, name := range []string{"aer_dev_fatal", "aer_dev_nonfatal"} {
		d.Errors += parseAttribute(f, name, 0, parseErrors)
	}
}

// readDeviceFiles reads the IOMMU group and the names of UIO and RDMA files.
func (s *scanner) readDeviceFiles(d *Device, f *folder) {
	if group := f.linkTarget("iommu_group", "iommu_groups"); group != "" {
		n, err := parseNode(group)
		f.noteError("iommu_group", err)
		// Only IOMMU groups of VFIO's own have a name.
		name, err := readAttribute(s.root, groupsFolder+"/"+group+"/name")
		if err != nil && !isUnavailable(err) {
			f.noteError("iommu_group", err)
		}
		d.IOMMUGroup, d.NoIOMMU = n, name == "vfio-noiommu"
	}
	d.UIO = f.listNames("uio")
	for _, name := range slices.Concat(f.listNames("infiniband_verbs"), f.listNames("infiniband_mad")) {
		d.RDMAFiles = append(d.RDMAFiles, "infiniband/"+name)
	}
	if len(d.RDMA) > 0 {
		d.RDMAFiles = append(d.RDMAFiles, s.files...)
	}
	slices.Sort(d.RDMAFiles)
}

// readSRIOV reads the numbers of VFs and the links between a PF and its VFs.
func (s *scanner) readSRIOV(d *Device, f *folder) {
	if d.PF = f.linkedFunction("physfn"); d.PF == d.Address {
		d.PF = Address{}
		f.noteError("physfn", errLink)
	}
	if !s.brief {
		d.SRIOV = f.has("sriov_totalvfs")
		d.TotalVFs = parseAttribute(f, "sriov_totalvfs", 0, parseCount)
		d.NumVFs = parseAttribute(f, "sriov_numvfs", 0, parseCount)
	}
	for _, name := range f.names {
		if !strings.HasPrefix(name, "virtfn") {
			continue
		}
		// A dangling link to a VF does not matter, because the VF also has one to its PF.
		target, err := readLink(f.Root, name, "")
		vf, addressErr := ParseAddress(target)
		if index, ok := parseVF(name); ok && err == nil && addressErr == nil {
			s.indexes[pair{d.Address, vf}] = index
		}
	}
}

// joinDevices returns the functions sorted by address, with the fields that depend on both the PF and the VF.
func (s *scanner) joinDevices() []Device {
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

// countVFs counts the links from the PF to VFs and those back, and returns the larger number. It ignores sriov_numvfs, which the kernel
// updates only after creating VFs.
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
