// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/kernel"
)

// linkInfo describes a network interface, as `ip -json link show` prints it.
type linkInfo struct {
	Name     string   `json:"ifname"`
	MAC      string   `json:"address"`
	MTU      int      `json:"mtu"`
	AltNames []string `json:"altnames"`
	Flags    []string `json:"flags"`
}

// linksIn returns the interfaces of a network namespace; "" is the namespace of the node.
func linksIn(netns string) (all []linkInfo, err error) {
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

// addInterfaces creates a veth in place of each VF of a sysfs tree, and returns the PCI addresses of the VFs.
func addInterfaces(t *testing.T, sysfs string) (ids []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/net/*v?"))
	if err != nil || len(paths) != allVFs {
		t.Fatal(paths, err)
	}
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	for i, path := range paths {
		name := filepath.Base(path)
		if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: name + "peer"}); err != nil {
			t.Fatal(err)
		}
		link, _, err := host.Link(name)
		other, _, err2 := host.Link(name + "peer")
		if err := errors.Join(err, err2, host.AddAltName(link, "alt-"+name), host.SetMTU(link, 1500-i), host.SetUp(other)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "link", "delete", name+"peer").Run() })
		ids = append(ids, filepath.Base(filepath.Dir(filepath.Dir(path))))
	}
	return ids // sorted, as Glob does
}

// linksOnNode returns those VF interfaces that are on the node. The keys of the map are the PCI addresses of the VFs.
func linksOnNode(t *testing.T, sysfs string) map[string]linkInfo {
	t.Helper()
	all, err := linksIn("")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]linkInfo{}
	for _, i := range all {
		path, _ := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/net", i.Name))
		if len(path) > 0 {
			i.Flags = slices.DeleteFunc(i.Flags, func(f string) bool { return f != "UP" && f != "PROMISC" })
			found[filepath.Base(filepath.Dir(filepath.Dir(path[0])))] = i
		}
	}
	return found
}

// journaledVFs returns the VFs for which the sriov plugin has a journal. A VF has a journal while a pod uses the VF.
func journaledVFs(t *testing.T) (ids []string) {
	t.Helper()
	entries, err := os.ReadDir("/run/podlace/.vfs")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			ids = append(ids, e.Name())
		}
	}
	return ids
}

// showCards mounts the PCI bus of a sysfs tree in the node's /sys, where the sriov plugin finds it, until the test ends. The rest of /sys
// is unchanged.
func showCards(t *testing.T, sysfs string) {
	t.Helper()
	top := t.TempDir()
	bind := func(from, name string) {
		t.Helper()
		to := filepath.Join(top, name)
		if err := errors.Join(os.MkdirAll(to, 0o755), unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
			t.Fatalf("mount %s at %s: %v", from, to, err)
		}
	}
	if err := unix.Mount("cards", top, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"*", "bus/*", "devices/*"} {
		paths, _ := filepath.Glob("/sys/" + pattern)
		for _, path := range paths {
			info, err := os.Stat(path)
			name := strings.TrimPrefix(path, "/sys/")
			if err != nil || !info.IsDir() || name == "bus" || name == "devices" || name == "bus/pci" || strings.HasPrefix(name, "devices/pci") {
				continue
			}
			bind(path, name)
		}
	}
	bind(filepath.Join(sysfs, "bus/pci"), "bus/pci")
	roots, _ := filepath.Glob(filepath.Join(sysfs, "devices/pci*"))
	for _, root := range roots {
		bind(root, "devices/"+filepath.Base(root))
	}
	if err := unix.Mount(top, "/sys", "", unix.MS_MOVE, ""); err != nil {
		t.Fatalf("move to /sys: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/sys", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// useConflist installs a conflist as the runtime's configuration until the test ends.
func useConflist(t *testing.T, text string) {
	t.Helper()
	config, err := os.ReadFile("/run/node/config.toml")
	_, dir, _ := strings.Cut(string(config), `conf_dir = "`)
	dir, _, ok := strings.Cut(dir, `"`)
	if err != nil || !ok {
		t.Fatalf("%s: %v", config, err)
	}
	path := filepath.Join(dir, conf.Default)
	former, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	set := func(text []byte) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path+".new", text, 0o600), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
		restartContainerd(t)
	}
	set([]byte(text))
	t.Cleanup(func() { set(former) })
}

// restartContainerd ends containerd. scripts/node.sh starts containerd again, and containerd reads its configuration.
func restartContainerd(t *testing.T) {
	t.Helper()
	pid := func() (n int) {
		data, _ := os.ReadFile("/run/node/containerd.pid")
		_, _ = fmt.Sscan(string(data), &n)
		return n
	}
	former := pid()
	if err := syscall.Kill(former, syscall.SIGTERM); err != nil || former == 0 {
		t.Fatalf("containerd has PID %d: %v", former, err)
	}
	checkWithin(t, 20*time.Second, "containerd runs again", func() error {
		if now := pid(); now == former || now == 0 {
			return errors.New("it has not ended")
		}
		return exec.Command("ctr", "--namespace", "k8s.io", "containers", "list").Run()
	})
}

// podSandbox is the sandbox of a running pod.
type podSandbox struct {
	id, netns  string
	pid        int
	containers []string // container IDs; endSandbox fills them in
}

// sandboxOf finds a pod's sandbox in the OCI specifications that containerd writes for runc. The second result is false without one.
func sandboxOf(pod string) (found podSandbox, ok bool) {
	files, _ := filepath.Glob("/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json")
	for _, f := range files {
		var c struct {
			Annotations map[string]string
			Linux       struct{ Namespaces []struct{ Type, Path string } }
		}
		data, err := os.ReadFile(f)
		if err != nil || json.Unmarshal(data, &c) != nil {
			continue // the process has just ended
		}
		a := c.Annotations
		init, err := os.ReadFile(filepath.Join(filepath.Dir(f), "init.pid"))
		if err != nil || a["io.kubernetes.cri.container-type"] != "sandbox" || a["io.kubernetes.cri.sandbox-name"] != pod+"-node" {
			continue
		}
		s := podSandbox{id: filepath.Base(filepath.Dir(f))}
		for _, n := range c.Linux.Namespaces {
			if n.Type == "network" {
				s.netns = n.Path
			}
		}
		if _, err := fmt.Sscan(string(init), &s.pid); err == nil && syscall.Kill(s.pid, 0) == nil {
			found, ok = s, true
		}
	}
	return found, ok
}

// runningAdds returns the number of sriov processes that run ADD.
func runningAdds() (n int) {
	programs, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, p := range programs {
		target, err := os.Readlink(p)
		if err != nil || filepath.Base(target) != "sriov" {
			continue
		}
		env, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "environ"))
		if strings.Contains("\x00"+string(env), "\x00CNI_COMMAND=ADD\x00") {
			n++
		}
	}
	return n
}
