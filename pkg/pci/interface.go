// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"strings"
)

// addInterfaces reads the interfaces that the PCI function has in this network namespace, except the representors of its VFs. If
// there are several interfaces, MTU, speed and channels are those of the interface whose name sorts first.
func (s *scanner) addInterfaces(d *Device, f *folder) {
	for _, dir := range interfaceFolders(f) {
		names, err := listFolder(f.Root, dir)
		f.noteError(dir, err)
		for _, name := range names {
			s.addInterface(d, f, dir+"/"+name, name)
		}
	}
	if len(d.Interfaces) > 0 {
		d.Channels = s.channels(d.Interfaces[0], d.Address)
	}
}

// interfaceFolders returns the folders that contain interfaces: the folder "net" of the PCI function, and the folder "net" of its virtio
// device.
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
	switchID, port := n.text("phys_switch_id"), n.text("phys_port_name")
	if d.SwitchID == "" {
		d.SwitchID = switchID
	}
	if isRepresentor(switchID, port) {
		return
	}
	first := len(d.Interfaces) == 0
	if d.Interfaces = append(d.Interfaces, name); first {
		d.PortName = port
		d.LinkType = parseAttribute(n, "type", "", parseLinkType)
	}
	if !s.brief { // these files wait for the kernel's lock of all interfaces, and drivers query the card
		if parseAttribute(n, "carrier", false, parseCarrier) {
			d.Carrier = true
		} else {
			d.Down = append(d.Down, name)
		}
	}
	if first && !s.brief {
		d.Speed = parseAttribute(n, "speed", 0, parseSpeed)
		d.MTU = parseAttribute(n, "mtu", 0, parseCount)
	}
	f.left = f.left || n.left
	if n.err != nil {
		f.noteError(at, n.err)
	}
}
