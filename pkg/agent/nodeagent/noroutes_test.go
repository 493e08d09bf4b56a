// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// without starts a program that lacks a capability, like one in a container that drops it.
func without(t *testing.T, capability uintptr, cmd *exec.Cmd) {
	t.Helper()
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // without an unlock: the thread ends with the goroutine
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0); err != nil {
			started <- err
			return
		}
		started <- cmd.Start()
	}()
	kerneltest.Must(t, <-started)
}

// TestWithoutRoutes: with "routes": false and without CAP_NET_ADMIN, the agent becomes ready without a problem and changes no route. It
// writes node.json, the plugins and the conflist, and updates node.json with the cluster.
func TestWithoutRoutes(t *testing.T) {
	l := newLab(t, `"routes": false`)
	cmd := l.agentCommand()
	without(t, unix.CAP_NET_ADMIN, cmd)
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}()
	l.await("ready", func() bool { return l.status().Ready })
	l.api.put(nodeObject("n7", []string{"10.250.7.0/24"}, []string{"192.0.2.7"})) // beyond clusterCIDRs
	l.await("the problem", func() bool { return l.says("cluster CIDRs", "10.250.7.0/24") })
	l.put("config/config.json", `{"routes": false, "binDir": "`+l.dir+`/bin", "confDir": "`+l.dir+`/net.d"}`)
	l.await("the new CIDRs", func() bool {
		return slices.ContainsFunc(l.node().ClusterCIDRs, func(c netip.Prefix) bool { return c.String() == "10.250.7.0/24" })
	})
	l.await("no problem", func() bool { s := l.status(); return s.Ready && len(s.Problems) == 0 && len(s.Peers) == 0 })
	l.has(nil)
	if _, err := os.Stat(l.dir + "/bin/podlace-bridge"); err != nil || l.read("net.d/"+conflistName) == "" {
		t.Errorf("plugins or conflist are missing: %v", err)
	}
}
