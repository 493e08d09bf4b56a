// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
)

// withoutNFT calls f on a thread that, with its child processes, cannot open netfilter sockets, as on a kernel without nf_tables.
func withoutNFT(t *testing.T, f func()) {
	t.Helper()
	const number, family, protocol = 0, 16, 32 // places in struct seccomp_data
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SOCKET, Jf: 5},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: family},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AF_NETLINK, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: protocol},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.NETLINK_NETFILTER, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // without unlock: the thread ends with this function
		var err error
		defer func() { failed <- err }() // also if f ends the test
		err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
		if err == nil {
			filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
			err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&filter)), 0, 0)
		}
		if err == nil {
			f()
		}
	}()
	if err := <-failed; err != nil {
		t.Skipf("SKIPPED: no seccomp: %v", err)
	}
}

// On a kernel without nf_tables, ADD uses iptables, or fails at once if the configuration requires nftables.
func TestWithoutNFT(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	withoutNFT(t, func() {
		for _, verb := range []string{"ADD", "CHECK"} {
			l.Fails(l.Call(verb, "a", "backend", "nftables"), plugin.CodeKernelFeature, "backend nftables: the kernel has no nf_tables")
		}
		if o := l.Call("ADD", "a"); !strings.Contains(o.Failure.Msg, "iptables-") { // iptables-nft gets no sockets either
			t.Errorf("ADD without backend: %s", o.Stdout)
		}
		l.Fails(l.Call("STATUS", "", "backend", "nftables"), plugin.CodeNotAvailable, "the kernel has no nf_tables")
		l.OK(l.Call("STATUS", ""))
	})
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("CHECK", "a", "backend", "nftables"))
	l.OK(l.Call("DEL", "a"))
}
