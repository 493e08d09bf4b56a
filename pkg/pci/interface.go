// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"strings"
)

// addInterfaces reads the function's interfaces in this network namespace, except the representors of its VFs.
func (s *scanner) addInterfaces(d *Device, f *folder) {
	for _, dir := range interfaceFolders(f) {
		names, err := listFolder(f.Root, dir)
		f.noteError(dir, err)
		for _, name := range names {
			s.addInterface(d, f, dir+"/"+name, name)
		}
	}
}

// interfaceFolders returns the folders with interfaces: "net" of the function and "net" of its virtio device.
func interfaceFolders(f *folder) (dirs []string) {
	for _, name := range f.names {
		switch {
		case name == "net":
			dirs = append(dirs, name)
		case strings.HasPrefix(name, "virtio"):
			if info, err := f.Stat(name + "/net"); err == nil && info.IsDir() {
				dirs = append(dirs, name+"/net")
			}
		}
	}
	return dirs
}

func (s *scanner) addInterface(d *Device, f *folder, at, name string) {
	n, err := openFolder(f.Root, at)
	if err != nil {
		f.noteError(at, err)
		return
	}
	defer n.Close()
	switchID := n.text("phys_switch_id")
	if d.SwitchID == "" {
		d.SwitchID = switchID
	}
	if isRepresentor(switchID, n.text("phys_port_name")) {
		d.Switchdev = true
		return
	}
	if d.Interfaces = append(d.Interfaces, name); len(d.Interfaces) == 1 {
		d.LinkType = parseAttribute(n, "type", "", parseLinkType)
	}
	if !s.brief { // reading carrier waits for the kernel's lock of all interfaces
		if parseAttribute(n, "carrier", false, parseCarrier) {
			d.Carrier = true
		} else {
			d.Down = append(d.Down, name)
		}
	}
	f.left = f.left || n.left
	if n.err != nil {
		f.noteError(at, n.err)
	}
}
