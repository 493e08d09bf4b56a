// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// nodeUplink is the node's link that the tenant tries to delete.
const nodeUplink = "btuplink0"

// deleteNodeUplink deletes nodeUplink from the pod, with the ID that the kernel shows there for the namespace of eth0's peer.
func deleteNodeUplink() error {
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(eth0.Attrs().NetNsID))))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(nodeUplink)))
	_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// tenantMain runs as a tenant's process with all capabilities in its own user and network namespace, after a line on standard input.
func tenantMain() int {
	if _, err := fmt.Scanln(); err != nil {
		fmt.Println(err)
		return 2
	}
	err := deleteNodeUplink()
	switch {
	case errors.Is(err, unix.EACCES):
		return 0
	case err == nil:
		fmt.Println("the link is deleted")
	default:
		fmt.Println(err)
	}
	return 1
}

// TestNodeByNamespaceID shows a known gap, which SECURITY.md describes: a process in a pod with CAP_NET_ADMIN in the node's user namespace
// can delete a link of the node, because the veth pair gives the node's namespace an ID that is valid in the pod.
func TestNodeByNamespaceID(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	makeUplink(t)
	if err := a.Pod.Do(deleteNodeUplink); err != nil {
		t.Errorf("from the node's user namespace: %v", err)
	}
	if onHost(nodeUplink, netlink.LinkDel) == nil {
		t.Error("the node keeps the link")
	}
}

// TestNodeByNamespaceIDFromUserNamespace: a pod with its own user namespace (hostUsers: false) cannot delete the node's link.
func TestNodeByNamespaceIDFromUserNamespace(t *testing.T) {
	l := newLab(t).other()
	tenant := exec.Command("/proc/self/exe") //nolint:noctx // the process ends when its standard input ends
	tenant.Env = append(os.Environ(), "BRIDGE_TENANT=1")
	tenant.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	var said bytes.Buffer
	tenant.Stdout, tenant.Stderr = &said, &said
	start, err := tenant.StdinPipe()
	kerneltest.Must(t, err, tenant.Start())
	path := filepath.Join("/proc", fmt.Sprint(tenant.Process.Pid), "ns/net")
	kerneltest.Must(t, unix.Mount(path, l.Pod.Path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { kerneltest.Must(t, unix.Unmount(l.Pod.Path, unix.MNT_DETACH)) })
	l.add("a")
	makeUplink(t)

	_, err = fmt.Fprintln(start)
	kerneltest.Must(t, err)
	if err := tenant.Wait(); err != nil {
		t.Errorf("want \"permission denied\" for the tenant: %v: %s", err, &said)
	}
	if err := onHost(nodeUplink, netlink.LinkDel); err != nil {
		t.Errorf("the node lost its link: %v", err)
	}
}

func makeUplink(t *testing.T) {
	t.Helper()
	kerneltest.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: nodeUplink}, PeerName: "btuplink1"}))
}
