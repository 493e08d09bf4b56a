// SPDX-License-Identifier: Apache-2.0

// Command oracle asks the code of Kubernetes itself - Topology Manager, device manager, static CPU policy - what it does with random pods on random
// nodes, and writes that down as JSON, for the port in integration/sim/kubelet to be compared with. Which devices the kubelet takes where
// it does not care is different each time, all else follows from the seed.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"syscall"

	"k8s.io/klog/v2"
)

func main() {
	seed := flag.Uint64("seed", 1, "`seed` of all that is random")
	merges := flag.Int("merges", 500, "`questions` to policies alone")
	nodes := flag.Int("nodes", 64, "`nodes` to let pods come to")
	pods := flag.Int("pods", 16, "`pods` on each")
	inside := flag.Bool("inside", false, "in namespaces of its own already")
	flag.Parse()
	run := reexec
	if *inside {
		run = func() error { return record(*seed, *merges, *nodes, *pods) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "oracle:", err)
		os.Exit(1)
	}
}

// reexec runs the program again where it may mount: the kubelet's folder is not a parameter.
func reexec() error {
	cmd := exec.Command("/proc/self/exe", append([]string{"-inside"}, os.Args[1:]...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	return cmd.Run()
}

// hide puts an empty /var/lib in place of the machine's, and makes sure of it: a kubelet may run here.
func hide() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := syscall.Mount("tmpfs", "/var/lib", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount tmpfs on /var/lib: %w", err)
	}
	entries, err := os.ReadDir("/var/lib")
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("/var/lib is not empty")
	}
	return err
}

func record(seed uint64, merges, nodes, pods int) error {
	if err := hide(); err != nil {
		return err
	}
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	r := recording{Kubernetes: version(), Merges: recordMerges(seed, merges)}
	for i := range nodes {
		n, err := recordNode(seed, i, pods)
		if err != nil {
			return fmt.Errorf("node %d: %w", i, err)
		}
		r.Nodes = append(r.Nodes, n)
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// version is that of Kubernetes as it was linked.
func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, d := range info.Deps {
		if d.Path == "k8s.io/kubernetes" {
			return d.Version
		}
	}
	return ""
}
