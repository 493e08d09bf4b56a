// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// frameType is an EtherType that is reserved for experiments (IEEE 802).
const frameType = 0x88b5

// SendFrame sends an Ethernet broadcast from one pod and waits for it in another, which needs a working link and no address.
func SendFrame(from, to *sandbox.Pod, ifname string, limit time.Duration) error {
	var receiver, sender int
	if err := to.Do(func() (err error) { receiver, err = packetSocket(ifname); return }); err != nil {
		return fmt.Errorf("%s: %w", to.Name, err)
	}
	defer unix.Close(receiver)
	if err := from.Do(func() (err error) { sender, err = packetSocket(ifname); return }); err != nil {
		return fmt.Errorf("%s: %w", from.Name, err)
	}
	defer unix.Close(sender)
	message := append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), from.Name...)
	if _, err := unix.Write(sender, message); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	b := make([]byte, 1500)
	n, _, err := ReceiveFrame(receiver, b, limit)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if !strings.Contains(string(b[:n]), from.Name) {
		return errors.New("another frame arrived")
	}
	return nil
}

// ReceiveFrame reads the next frame of a packet socket. A signal does not end the wait, although the kernel interrupts a read with a time
// limit.
func ReceiveFrame(socket int, b []byte, limit time.Duration) (n int, from unix.Sockaddr, err error) {
	for end := time.Now().Add(limit); ; {
		wait := unix.NsecToTimeval(max(int64(time.Microsecond), int64(time.Until(end)))) // the kernel takes zero for no limit
		if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
			return 0, nil, err
		}
		if n, from, err = unix.Recvfrom(socket, b, 0); !errors.Is(err, unix.EINTR) {
			return n, from, err
		}
	}
}

func packetSocket(ifname string) (int, error) {
	link, err := net.InterfaceByName(ifname)
	if err != nil {
		return 0, err
	}
	const protocol = uint16(frameType>>8 | frameType&0xff<<8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index}); err != nil {
		_ = syscall.Close(fd)
		return 0, err
	}
	return fd, nil
}
