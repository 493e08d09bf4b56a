// SPDX-License-Identifier: Apache-2.0

package pcitest

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Machine describes a machine whose network cards all have PFs 8086:1593 with the driver ice, and VFs 8086:1889.
type Machine struct {
	Nodes  int    // number of NUMA nodes; 0: the machine does not report the cards' nodes
	PFs    int    // of each node, ens0f0, ens0f1, ens1f0...
	VFs    int    // of each PF
	Stride int    // distance of the VFs' addresses, 1 if 0; igb has 2
	Driver string // of VFs, iavf if ""
	InPods bool   // the interfaces of all VFs are in other namespaces
	CPUs   int    // of each node, 16 if 0
}

// Generate creates the sysfs tree of a machine in a temporary folder, and returns its path.
func Generate(t testing.TB, m Machine) (sysfs string) {
	t.Helper()
	sysfs = t.TempDir()
	for _, d := range []string{"ice", "iavf", "vfio-pci", m.vfDriver()} {
		must(t, os.MkdirAll(filepath.Join(sysfs, "bus/pci/drivers", d), 0o755))
	}
	must(t, os.MkdirAll(filepath.Join(sysfs, "kernel/iommu_groups"), 0o755))
	write(t, filepath.Join(sysfs, "bus/pci/drivers_probe"), "")
	nodes, cpus := max(m.Nodes, 1), cmp.Or(m.CPUs, 16)
	write(t, filepath.Join(sysfs, "devices/system/node/online"), strings.TrimSuffix(fmt.Sprintf("0-%d", nodes-1), "-0")+"\n")
	for n := range nodes {
		var distances []string
		for other := range nodes {
			distances = append(distances, map[bool]string{true: "10", false: "21"}[other == n])
		}
		fillFolder(t, filepath.Join(sysfs, "devices/system/node", fmt.Sprint("node", n)),
			fmt.Sprintf("cpulist %d-%d\ndistance %s", n*cpus, (n+1)*cpus-1, strings.Join(distances, " ")))
		for p := range m.PFs {
			m.addPF(t, sysfs, n, p)
		}
	}
	return sysfs
}

func (m Machine) vfDriver() string {
	if m.Driver == "" {
		return "iavf"
	}
	return m.Driver
}

// addPF adds PF p to NUMA node n, with its own PCI root and enough bus numbers for its VFs.
func (m Machine) addPF(t testing.TB, sysfs string, n, p int) {
	t.Helper()
	index, step := n*m.PFs+p, 4+max(m.Stride, 1)*m.VFs/256
	perDomain := 0xe0 / step
	domain, bus := index/perDomain, 0x10+index%perDomain*step
	pf := filepath.Join(sysfs, fmt.Sprintf("devices/pci%04x:%02x/%04[1]x:%02[2]x:00.0/%04[1]x:%02[3]x:00.0", domain, bus, bus+1))
	node := n
	if m.Nodes == 0 {
		node = -1
	}
	ifname := fmt.Sprintf("ens%df%d", n, p)
	fillFolder(t, pf, fmt.Sprintf("vendor 0x8086\ndevice 0x1593\nclass 0x020000\nnuma_node %d\ndriver_override (null)\nsriov_totalvfs %d\n"+
		"sriov_numvfs %d\nsriov_offset 16\nsriov_stride %d\nsriov_vf_device 1889", node, max(m.VFs, 1), m.VFs, max(m.Stride, 1)))
	fillFolder(t, filepath.Join(pf, "net", ifname), "type 1\ncarrier 1\nspeed 25000\nmtu 1500")
	must(t, bindDriver(sysfs, pf, "ice"))
	addToBus(t, sysfs, pf)
	for v := range m.VFs {
		vf, err := addVF(sysfs, pf, v, index*m.VFs+v, m.vfDriver())
		must(t, err)
		if hasInterface(m.vfDriver()) && !m.InPods {
			fillFolder(t, filepath.Join(vf, "net", fmt.Sprintf("%sv%d", ifname, v)), "type 1\ncarrier 1\nspeed 25000\nmtu 1500")
		}
	}
}

// addVF adds a VF and returns its folder. Its address follows from the PF's attributes (SR-IOV specification 2.1.2). It gets an IOMMU
// group, and its interface is in another network namespace.
func addVF(sysfs, pf string, index, group int, driver string) (folder string, err error) {
	rid, err := routingID(pf, index)
	if err != nil {
		return "", err
	}
	address := fmt.Sprintf("%s:%02x:%02x.%x", filepath.Base(pf)[:len(filepath.Base(pf))-len(":00:00.0")], rid>>8, rid>>3&0x1f, rid&7)
	folder = filepath.Join(filepath.Dir(pf), address)
	attributes := map[string]string{"driver_override": "(null)"}
	for name, from := range map[string]string{"vendor": "vendor", "class": "class", "numa_node": "numa_node", "device": "sriov_vf_device"} {
		text, err := os.ReadFile(filepath.Join(pf, from))
		if err != nil {
			return "", err
		}
		attributes[name] = strings.TrimSpace(string(text))
	}
	attributes["device"] = "0x" + attributes["device"]
	if err := os.Mkdir(folder, 0o755); err != nil {
		return "", err
	}
	for name, text := range attributes {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), []byte(text+"\n"), 0o644))
	}
	groups := filepath.Join(sysfs, "kernel/iommu_groups", strconv.Itoa(group))
	// The PF's link to the VF is created last, so that a program that follows the link finds a complete VF.
	return folder, errors.Join(err, os.MkdirAll(groups, 0o755), linkRelative(groups, filepath.Join(folder, "iommu_group")),
		linkRelative(pf, filepath.Join(folder, "physfn")), bindDriver(sysfs, folder, driver), linkRelative(folder, filepath.Join(sysfs, "bus/pci/devices", address)),
		linkRelative(folder, filepath.Join(pf, fmt.Sprint("virtfn", index))))
}

// routingID returns the routing ID of a VF: its bus, device and function numbers as one number.
func routingID(pf string, index int) (int, error) {
	var bus, device, number, offset, stride int
	name := filepath.Base(pf)
	if _, err := fmt.Sscanf(name[len(name)-len("00:00.0"):], "%x:%x.%x", &bus, &device, &number); err != nil {
		return 0, err
	}
	for file, n := range map[string]*int{"sriov_offset": &offset, "sriov_stride": &stride} {
		text, err := os.ReadFile(filepath.Join(pf, file))
		if err == nil {
			*n, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		if err != nil {
			return 0, err
		}
	}
	return bus<<8 + device<<3 + number + offset + stride*index, nil
}

// linkRelative creates a relative symlink like those in sysfs, and the folder that contains the symlink.
func linkRelative(target, at string) error {
	path, err := filepath.Rel(filepath.Dir(at), target)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.Symlink(path, at))
}

// bindDriver binds a PCI function to a driver. The folder net is then empty, as if its interface were in another network namespace.
func bindDriver(sysfs, folder, driver string) error {
	if driver == "" {
		return nil
	}
	if hasInterface(driver) {
		if err := os.MkdirAll(filepath.Join(folder, "net"), 0o755); err != nil {
			return err
		}
	}
	return linkRelative(filepath.Join(sysfs, "bus/pci/drivers", driver), filepath.Join(folder, "driver"))
}

// unbindDriver unbinds a PCI function from its driver and removes the interfaces of the PCI function.
func unbindDriver(folder, driver string) error {
	target, err := os.Readlink(filepath.Join(folder, "driver"))
	if err != nil || filepath.Base(target) != driver {
		return errors.Join(err, fs.ErrInvalid)
	}
	return errors.Join(os.RemoveAll(filepath.Join(folder, "net")), os.Remove(filepath.Join(folder, "driver")))
}

func hasInterface(driver string) bool {
	return !strings.HasPrefix(driver, "vfio") && !strings.HasPrefix(driver, "uio") && !strings.HasPrefix(driver, "igb_uio")
}
