// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	numaNodes = 2
	cpusEach  = 8 // of a NUMA node
)

// fakeMachine mounts files over /sys, so that the node's kubelet finds more CPUs and NUMA nodes than the machine has.
func fakeMachine() error {
	return errors.Join(fakeCPUs("/sys/devices/system/cpu"), fakeNUMA("/sys/devices/system/node"))
}

func fakeCPUs(at string) error {
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	all := fmt.Sprintf("0-%d", numaNodes*cpusEach-1)
	files := map[string]string{"online": all, "possible": all, "present": all}
	for cpu := range numaNodes * cpusEach {
		files[fmt.Sprintf("cpu%d/online", cpu)] = "1"
		files[fmt.Sprintf("cpu%d/topology/core_id", cpu)] = fmt.Sprint(cpu)
		files[fmt.Sprintf("cpu%d/topology/physical_package_id", cpu)] = fmt.Sprint(cpu / cpusEach)
	}
	return writeAll(at, files)
}

func fakeNUMA(at string) error {
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	all := fmt.Sprintf("0-%d", numaNodes-1)
	files := map[string]string{"online": all, "possible": all}
	for n := range numaNodes {
		distances := make([]string, numaNodes)
		for other := range distances {
			distances[other] = map[bool]string{true: "10", false: "20"}[other == n]
		}
		name := fmt.Sprintf("node%d/", n)
		files[name+"cpulist"] = fmt.Sprintf("%d-%d", n*cpusEach, (n+1)*cpusEach-1)
		files[name+"distance"] = strings.Join(distances, " ")
		files[name+"meminfo"] = fmt.Sprintf("Node %d MemTotal:       8388608 kB", n)
	}
	if err := writeAll(at, files); err != nil {
		return err
	}
	var errs []error
	for cpu := range numaNodes * cpusEach {
		dir := fmt.Sprintf("%s/node%d", at, cpu/cpusEach)
		errs = append(errs, os.MkdirAll(dir+"/hugepages", 0o755),
			os.Symlink(fmt.Sprintf("../../cpu/cpu%d", cpu), fmt.Sprintf("%s/cpu%d", dir, cpu)))
	}
	return errors.Join(errs...)
}

func writeAll(at string, files map[string]string) error {
	for name, text := range files {
		path := filepath.Join(at, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}
