// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// withoutUser has the flags for all new namespaces except the user namespace.
const withoutUser = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWNET

// userNamespace returns the attributes of the second process. For root, every user ID of the parent namespace is mapped to itself;
// otherwise the namespace contains only the user's own ID.
func userNamespace() (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | withoutUser,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	if os.Geteuid() != 0 {
		return attr, nil
	}
	var err error
	if attr.UidMappings, err = ownMap("/proc/self/uid_map"); err != nil {
		return nil, err
	}
	if attr.GidMappings, err = ownMap("/proc/self/gid_map"); err != nil {
		return nil, err
	}
	// A user namespace cannot have more rights than its parent: if the parent's setgroups is "deny", the kernel does not accept "allow".
	groups, err := os.ReadFile("/proc/self/setgroups")
	attr.GidMappingsEnableSetgroups = err == nil && strings.TrimSpace(string(groups)) == "allow"
	return attr, nil
}

// ownMap returns an ID map of every existing ID to itself.
func ownMap(file string) ([]syscall.SysProcIDMap, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the id map: %w", err)
	}
	return parseIDMap(string(text))
}

func parseIDMap(text string) ([]syscall.SysProcIDMap, error) {
	var out []syscall.SysProcIDMap
	for line := range strings.Lines(text) {
		var first, outside, size int
		if _, err := fmt.Sscan(line, &first, &outside, &size); err != nil {
			return nil, fmt.Errorf("id map line %q: %w", line, err)
		}
		out = append(out, syscall.SysProcIDMap{ContainerID: first, HostID: first, Size: size})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("the id map is empty, so no user namespace can be made: run it outside of this one, or as root of the machine")
	}
	return out, nil
}
