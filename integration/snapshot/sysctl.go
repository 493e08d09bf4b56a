// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctlRoot is the folder of sysctls, which are those of the network namespace of the thread that opens it.
const sysctlRoot = "/proc/sys/net/"

// collectSysctls reads all settings of every interface, and the general ones that network plugins may change.
func (c *collector) collectSysctls() error {
	for _, group := range []string{"ipv4/conf/", "ipv6/conf/"} {
		entries, err := os.ReadDir(sysctlRoot + group)
		if err != nil {
			continue // no IPv6
		}
		for _, entry := range entries {
			if err := c.collectConf(group+entry.Name(), "link "+entry.Name()); err != nil {
				return err
			}
		}
	}
	if err := c.collectConf("bridge", ""); err != nil {
		return err
	}
	for _, name := range []string{
		"ipv4/ip_forward", "ipv4/ip_nonlocal_bind", "ipv6/ip_nonlocal_bind", "ipv4/ip_unprivileged_port_start",
		"ipv4/ping_group_range", "ipv4/ip_local_port_range", "ipv4/ip_local_reserved_ports",
		"netfilter/nf_conntrack_acct", "netfilter/nf_conntrack_tcp_be_liberal", "core/somaxconn",
	} {
		if value, ok := readSysctl(unix.AT_FDCWD, sysctlRoot+name); ok {
			c.add("sysctl net/"+name, field{"value", value})
		}
	}
	return nil
}

// collectConf adds one record for a folder of sysctls.
func (c *collector) collectConf(name, owner string) error {
	dir, err := os.Open(sysctlRoot + name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the interface was deleted meanwhile, or there is no br_netfilter
	}
	if err != nil {
		return fmt.Errorf("read sysctls: %w", err)
	}
	defer dir.Close()
	files, err := dir.Readdirnames(-1)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read sysctls: %w", err)
	}
	r := record{scope: c.scope, name: "sysctl net/" + name, owner: owner}
	for _, file := range files {
		if value, ok := readSysctl(int(dir.Fd()), file); ok {
			r.fields = append(r.fields, field{file, value})
		}
	}
	c.records = append(c.records, r)
	return nil
}

// readSysctl reads a setting. The second result is false if it is write-only or has no value. It makes only three system calls, because
// there are hundreds of settings.
func readSysctl(dir int, name string) (string, bool) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", false
	}
	defer unix.Close(fd)
	var buf [4096]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return "", false
	}
	return strings.Join(strings.Fields(string(buf[:n])), " "), true
}
