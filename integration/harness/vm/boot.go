// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// sharedFolder is where a folder of the host is mounted in the guest, which executes the file "run" in it and writes the exit status to
// "exit".
const sharedFolder = "/mnt"

// bootGuest runs in the guest's first process, and always powers the machine off in the end.
func bootGuest() {
	if err := start(); err != nil {
		fmt.Println("vm:", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

func start() error {
	for _, m := range [][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}} {
		if err := mount(m[0], m[1], m[0], 0, ""); err != nil {
			return err
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	output, err := openPort("output")
	if err != nil {
		return err
	}
	if err := enterHostRoot(); err != nil {
		return err
	}
	for _, m := range [][4]string{
		{"devpts", "/dev/pts", "devpts"}, {"tmpfs", "/dev/shm", "tmpfs"}, {"tmpfs", "/run", "tmpfs", "mode=755"},
		{"tmpfs", "/tmp/guest", "tmpfs"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2"}, {"debugfs", "/sys/kernel/debug", "debugfs"},
		{"shared", sharedFolder, "9p", plan9 + ",cache=none"},
	} {
		if err := mount(m[0], m[1], m[2], 0, m[3]); err != nil {
			return err
		}
	}
	return runCommand(output)
}

const plan9 = "trans=virtio,version=9p2000.L,msize=512000"

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, target, err)
	}
	return nil
}

func loadModules() error {
	list, err := os.ReadFile("/" + loadList)
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(list)) {
		f, err := os.Open("/" + name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

// openPort opens a virtio port, which transfers bytes unchanged, unlike a console.
func openPort(name string) (*os.File, error) {
	for range 500 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, file := range names {
			if text, _ := os.ReadFile(file); strings.TrimSpace(string(text)) == name {
				// A write to the port needs a blocking file descriptor, which os.OpenFile would not give.
				fd, err := unix.Open("/dev/"+filepath.Base(filepath.Dir(file)), unix.O_WRONLY|unix.O_CLOEXEC, 0)
				if err == nil {
					return os.NewFile(uintptr(fd), name), nil
				}
			}
		}
		time.Sleep(10 * time.Millisecond) // the device appears with a delay
	}
	return nil, fmt.Errorf("no virtio port %s", name)
}

// enterHostRoot makes the host's file system the guest's root. What the guest writes stays in memory. The modules of its kernel are mounted
// where modprobe looks for them.
func enterHostRoot() error {
	if err := mount("root", "/host", "9p", unix.MS_RDONLY, plan9+",cache=loose"); err != nil {
		return err
	}
	if err := mount("tmpfs", "/memory", "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, dir := range []string{"/memory/upper", "/memory/work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mount("overlay", "/root", "overlay", 0, "lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work"); err != nil {
		return err
	}
	folder := bootParameter("vm")
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte(folder+"/bin/modprobe"), 0o644); err != nil {
		return err
	}
	if err := mount("/root"+folder+"/modules/lib/modules", "/root/lib/modules", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		if err := mount(dir, "/root"+dir, "", unix.MS_MOVE, ""); err != nil {
			return err
		}
	}
	err := errors.Join(os.Chdir("/root"), unix.Mount(".", "/", "", unix.MS_MOVE, ""), unix.Chroot("."), os.Chdir("/"))
	return err
}

// bootParameter returns the value of podlace.NAME= in the kernel's command line.
func bootParameter(name string) string {
	line, _ := os.ReadFile("/proc/cmdline")
	for _, word := range strings.Fields(string(line)) {
		if value, ok := strings.CutPrefix(word, "podlace."+name+"="); ok {
			return value
		}
	}
	return ""
}

func runCommand(output *os.File) error {
	cmd := exec.Command(sharedFolder + "/run")
	cmd.Stdout, cmd.Stderr = output, output
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=/tmp/guest"}
	err := cmd.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return err
	}
	return os.WriteFile(sharedFolder+"/exit", fmt.Appendln(nil, cmd.ProcessState.ExitCode()), 0o644)
}
