// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/podlace/podlace/pkg/fault"
)

// Numbers and structure sizes of ethtool requests, from linux/sockios.h and linux/ethtool.h. Linux has 64 features of interfaces.
const (
	siocEthtool = 0x8946

	getStrings  = 0x1b // ETHTOOL_GSTRINGS
	countSet    = 0x37 // ETHTOOL_GSSET_INFO
	getFeatures = 0x3a // ETHTOOL_GFEATURES
	setFeatures = 0x3b // ETHTOOL_SFEATURES

	featureSet  = 4 // ETH_SS_FEATURES
	maxFeatures = 256
	maxBlocks   = maxFeatures / 32
)

type (
	ifreq struct {
		name [syscall.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	setInfo struct {
		command, _ uint32
		mask       uint64
		count      [1]uint32
	}
	setStrings struct {
		command, set, count uint32
		names               [maxFeatures][32]byte
	}
	wantedFeatures struct {
		command, blocks uint32
		features        [maxBlocks]struct{ valid, requested uint32 }
	}
	hadFeatures struct {
		command, blocks uint32
		features        [maxBlocks]struct{ available, requested, active, neverChanged uint32 }
	}
)

// featureSocket reads and changes the features of one interface.
type featureSocket struct {
	fd     int
	ifname string
	names  []string // by feature number, "" for one that this kernel does not have
}

// openFeatures opens a featureSocket, or returns syscall.EOPNOTSUPP if the kernel does not report features.
func openFeatures(ifname string) (*featureSocket, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &featureSocket{fd: fd, ifname: ifname}
	if err := s.readNames(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *featureSocket) close() { _ = syscall.Close(s.fd) }

func (s *featureSocket) call(request unsafe.Pointer) error {
	r := ifreq{data: request}
	if copy(r.name[:len(r.name)-1], s.ifname) != len(s.ifname) {
		return syscall.ENAMETOOLONG
	}
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(s.fd), siocEthtool, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return errno
	}
	return nil
}

func (s *featureSocket) readNames() error {
	info := setInfo{command: countSet, mask: 1 << featureSet}
	if err := s.call(unsafe.Pointer(&info)); err != nil {
		return err
	}
	if info.mask == 0 {
		return syscall.EOPNOTSUPP
	}
	if info.count[0] > maxFeatures {
		return fmt.Errorf("the kernel has %d: want at most %d", info.count[0], maxFeatures)
	}
	all := setStrings{command: getStrings, set: featureSet, count: info.count[0]}
	if err := s.call(unsafe.Pointer(&all)); err != nil {
		return err
	}
	for _, name := range all.names[:info.count[0]] {
		text, _, _ := bytes.Cut(name[:], []byte{0})
		s.names = append(s.names, string(text))
	}
	return nil
}

func (s *featureSocket) enabled() ([]string, error) {
	had := hadFeatures{command: getFeatures, blocks: maxBlocks}
	if err := s.call(unsafe.Pointer(&had)); err != nil {
		return nil, err
	}
	var on []string
	for i, name := range s.names {
		if name != "" && had.features[i/32].active&(1<<(i%32)) != 0 {
			on = append(on, name)
		}
	}
	return on, nil
}

// switchFeatures enables each feature in the list for which `on` returns true, and disables the others in it.
func (s *featureSocket) switchFeatures(names []string, on func(name string) bool) error {
	want := wantedFeatures{command: setFeatures, blocks: uint32(len(s.names)+31) / 32}
	for i, name := range s.names {
		if bit := uint32(1) << (i % 32); slices.Contains(names, name) {
			want.features[i/32].valid |= bit
			if on(name) {
				want.features[i/32].requested |= bit
			}
		}
	}
	return s.call(unsafe.Pointer(&want))
}

// Features returns the enabled features of an interface by the names of "ethtool -k", sorted, or none if the kernel does not report
// them.
func Features(ifname string) (on []string, err error) {
	s, err := openFeatures(ifname)
	if errors.Is(err, syscall.EOPNOTSUPP) {
		return nil, nil
	}
	if err == nil {
		defer s.close()
		on, err = s.enabled()
	}
	slices.Sort(on)
	if err != nil {
		return nil, fmt.Errorf("features of %s: %w", ifname, err)
	}
	return on, nil
}

// SetFeatures enables exactly the given features and disables all others. One that the driver cannot switch stays as it is without an
// error.
func SetFeatures(ifname string, on []string) error {
	s, err := openFeatures(ifname)
	if err != nil {
		return fmt.Errorf("features of %s: %w", ifname, err)
	}
	defer s.close()
	now, err := s.enabled()
	if err != nil {
		return fmt.Errorf("features of %s: %w", ifname, err)
	}
	shall := func(name string) bool { return slices.Contains(on, name) }
	var other, words []string
	for _, name := range slices.Sorted(slices.Values(s.names)) {
		if name != "" && slices.Contains(now, name) != shall(name) {
			other = append(other, name)
			words = append(words, fmt.Sprintf(" %s %s", name, map[bool]string{true: "on", false: "off"}[shall(name)]))
		}
	}
	if len(other) == 0 {
		return nil
	}
	op := "ethtool -K " + ifname + strings.Join(words, "")
	return fault.Change(op, func() error { return s.switchFeatures(other, shall) })
}
