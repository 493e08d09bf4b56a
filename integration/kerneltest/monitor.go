// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Monitor watches routes, nexthop objects, links, addresses and rules in the caller's namespace, and files in folders. changes returns all
// changes since then, except the opening of a .lock file; stop ends the monitoring.
func Monitor(folders ...string) (changes func() []string, stop func(), err error) {
	kernel, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, nil, fmt.Errorf("netlink socket: %w", err)
	}
	files, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		unix.Close(kernel)
		return nil, nil, fmt.Errorf("inotify: %w", err)
	}
	stop = func() {
		unix.Close(kernel)
		unix.Close(files)
	}
	err = unix.Bind(kernel, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range []int{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_NEXTHOP,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE} {
		err = errors.Join(err, unix.SetsockoptInt(kernel, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
	}
	for _, dir := range folders {
		_, e := unix.InotifyAddWatch(files, dir, unix.IN_MODIFY|unix.IN_ATTRIB|unix.IN_CREATE|unix.IN_DELETE|unix.IN_MOVE|unix.IN_CLOSE_WRITE)
		err = errors.Join(err, e)
	}
	if err != nil {
		stop()
		return nil, nil, fmt.Errorf("monitor: %w", err)
	}
	var seen []string
	return func() []string {
		seen = append(append(seen, kernelChanges(kernel)...), fileChanges(files)...)
		return seen
	}, stop, nil
}

func kernelChanges(socket int) (list []string) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := unix.Read(socket, buffer)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			list = append(list, "more netlink messages than there was room for")
		case err != nil || n < unix.SizeofNlMsghdr:
			return list
		default:
			list = append(list, fmt.Sprintf("netlink message %d", uint16(buffer[4])|uint16(buffer[5])<<8))
		}
	}
}

func fileChanges(inotify int) (list []string) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := unix.Read(inotify, buffer)
		if err != nil || n <= 0 {
			return list
		}
		for at := 0; at < n; {
			length := int(buffer[at+12])
			mask := uint32(buffer[at+4]) | uint32(buffer[at+5])<<8
			name := strings.TrimRight(string(buffer[at+16:at+16+length]), "\x00")
			if !strings.HasSuffix(name, ".lock") || mask&unix.IN_CLOSE_WRITE == 0 {
				list = append(list, fmt.Sprintf("inotify %#x %s", mask, name))
			}
			at += 16 + length
		}
	}
}
