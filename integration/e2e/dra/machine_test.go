// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
)

// Most tests have the PFs pf0 and pf1, one on each NUMA node.
const (
	pf0, pf0Name = "0000:11:00.0", "ens0f0"
	pf1, pf1Name = "0000:15:00.0", "ens1f0"
)

// iface describes a network interface, as `ip -json link show` prints it.
type iface struct {
	Name     string   `json:"ifname"`
	MAC      string   `json:"address"`
	MTU      int      `json:"mtu"`
	AltNames []string `json:"altnames"`
	Flags    []string `json:"flags"`
}

// interfaces returns the interfaces of a network namespace; "" is the namespace of the node.
func interfaces(netns string) (all []iface, err error) {
	command := []string{"ip", "-json", "link", "show"}
	if netns != "" {
		command = append([]string{"nsenter", "--net=" + netns}, command...)
	}
	out, err := exec.Command(command[0], command[1:]...).Output()
	if err == nil {
		err = json.Unmarshal(out, &all)
	}
	return all, err
}

// addInterfaces creates a veth for each VF interface of the sysfs tree, and returns the PCI addresses of all VFs.
func addInterfaces(t *testing.T, sysfs string) (ids []string) {
	t.Helper()
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	paths, _ := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/physfn"))
	for i, path := range paths {
		ids = append(ids, filepath.Base(filepath.Dir(path)))
		names, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "net/*"))
		if len(names) == 0 {
			continue
		}
		name := filepath.Base(names[0])
		if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: name + "peer"}); err != nil {
			t.Fatal(err)
		}
		link, _, err := host.Link(name)
		other, _, err2 := host.Link(name + "peer")
		if err := errors.Join(err, err2, host.AddAltName(link, "alt-"+name), host.SetMTU(link, 1500-i), host.SetUp(other)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "link", "delete", name+"peer").Run() })
	}
	return ids // sorted, as Glob does
}

// atHome returns those VF interfaces that are on the node. The keys of the map are the PCI addresses of the VFs.
func atHome(t *testing.T, sysfs string) map[string]iface {
	t.Helper()
	all, err := interfaces("")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]iface{}
	for _, i := range all {
		path, _ := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/net", i.Name))
		if len(path) > 0 {
			i.Flags = slices.DeleteFunc(i.Flags, func(f string) bool { return f != "UP" && f != "PROMISC" })
			found[filepath.Base(filepath.Dir(filepath.Dir(path[0])))] = i
		}
	}
	return found
}

// allHome returns an error if a journal exists, or if a VF is not on the node with its original settings.
func (l *lab) allHome() error {
	if left := journals(); len(left) > 0 {
		return fmt.Errorf("journals of %v remain", left)
	}
	now := atHome(l.T, l.sysfs)
	for id, was := range l.before {
		if is := now[id]; fmt.Sprintf("%+v", was) != fmt.Sprintf("%+v", is) {
			return fmt.Errorf("VF %s is %+v: want %+v", id, is, was)
		}
	}
	return nil
}

// journals returns the VFs with a journal, which are those that pods use.
func journals() (ids []string) {
	entries, _ := os.ReadDir("/run/podlace/.vfs")
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			ids = append(ids, e.Name())
		}
	}
	return ids
}

// ownSys replaces the node's /sys by a copy without a PCI bus, which showCards adds. All tests share it, because a running kubelet keeps
// the cgroup folder of the /sys that it found at its start.
func ownSys() error {
	top, err := os.MkdirTemp("", "sys-")
	if err != nil {
		return err
	}
	if err := unix.Mount("cards", top, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, pattern := range []string{"*", "bus/*", "devices/*"} {
		paths, _ := filepath.Glob("/sys/" + pattern)
		for _, path := range paths {
			info, err := os.Stat(path)
			name := strings.TrimPrefix(path, "/sys/")
			if err != nil || !info.IsDir() || name == "bus" || name == "devices" || name == "bus/pci" || strings.HasPrefix(name, "devices/pci") {
				continue
			}
			if err := bind(path, filepath.Join(top, name)); err != nil {
				return err
			}
		}
	}
	if err := unix.Mount(top, "/sys", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move to /sys: %w", err)
	}
	return os.Remove(top)
}

func bind(from, to string) error {
	if err := errors.Join(os.MkdirAll(to, 0o755), unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
		return fmt.Errorf("mount %s at %s: %w", from, to, err)
	}
	return nil
}

// showCards mounts the PCI bus of a sysfs tree in the node's /sys until the test ends. The sriov plugin finds it there.
func showCards(t *testing.T, sysfs string) {
	t.Helper()
	paths, _ := filepath.Glob(filepath.Join(sysfs, "devices/pci*"))
	for _, path := range append(paths, filepath.Join(sysfs, "bus/pci")) {
		at := filepath.Join("/sys", strings.TrimPrefix(path, sysfs))
		if err := bind(path, at); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := errors.Join(unix.Unmount(at, unix.MNT_DETACH), os.Remove(at)); err != nil {
				t.Error(err)
			}
		})
	}
}

// deviceName returns the name of a VF in the node's ResourceSlices.
func deviceName(id string) string { return strings.NewReplacer(":", "-", ".", "-").Replace(id) }

// numaOf returns the NUMA node of a device.
func (l *lab) numaOf(id string) string {
	l.Helper()
	data, err := os.ReadFile(filepath.Join(l.sysfs, "bus/pci/devices", id, "numa_node"))
	if err != nil {
		l.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// pfOf returns the PF of a VF.
func (l *lab) pfOf(id string) string {
	l.Helper()
	path, err := filepath.EvalSymlinks(filepath.Join(l.sysfs, "bus/pci/devices", id, "physfn"))
	if err != nil {
		l.Fatal(err)
	}
	return filepath.Base(path)
}
