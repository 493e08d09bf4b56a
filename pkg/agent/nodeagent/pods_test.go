// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/store"
)

// attach adds a pod to a bridge of the node.
func (l *lab) attach() *sandbox.Pod {
	l.Helper()
	type object = kerneltest.Object
	main := kerneltest.Lab{T: l.T, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(l), Conf: object{
		"cniVersion": "1.1.0", "name": "restored", "type": "bridge", "bridge": "restored0", "isGateway": true, "antiSpoof": true,
		"ipam": object{"type": "host-local", "subnet": "10.93.0.0/29"}}}
	main.OK(main.Call("ADD", "a"))
	l.Cleanup(func() {
		main.OK(main.Call("DEL", "a"))
		_ = exec.Command("ip", "link", "del", "restored0").Run()
	})
	return main.Pod
}

// TestPodsRestored: what another program removes from pods comes back and is counted. What cannot be restored is a problem in the status,
// until it can.
func TestPodsRestored(t *testing.T) {
	l := newLab(t)
	l.HTTP = "unix:" + l.dir + "/http"
	pod := l.attach()
	l.ready()
	l.awaitMetrics("at the start", map[string]float64{"restored_total": 0})
	time.Sleep(time.Second) // until the next comparison may come
	kerneltest.Must(t, kerneltest.FlushNFT(), exec.Command("ip", "link", "set", "restored0", "down").Run())
	l.awaitMetrics("after a flush", map[string]float64{"restored_total": 2, "problems": 1})
	if link, err := netlink.LinkByName("restored0"); err != nil || link.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("the bridge: %+v, %v", link, err)
	}
	folder := filepath.Dir(pod.Path)
	kerneltest.Must(t, os.Rename(folder, folder+"-hidden"), exec.Command("ip", "link", "set", "restored0", "down").Run())
	l.awaitMetrics("of a pod whose namespace this container does not see", map[string]float64{"restored_total": 3, "problems": 1})
	records := filepath.Join(store.Root, "restored")
	kerneltest.Must(t, os.Rename(folder+"-hidden", folder), os.Rename(records, filepath.Join(store.Root, ".lost")),
		exec.Command("sh", "-c", "ip link add gone0 type ifb && ip link del gone0").Run())
	l.await("a problem", func() bool { return l.says("pods", "their records below /run/podlace are lost") })
	kerneltest.Must(t, os.Rename(filepath.Join(store.Root, ".lost"), records))
	l.awaitMetrics("in the end", map[string]float64{"restored_total": 3, "problems": 1})
}

// TestPodsContested: a program that removes rules for ever is named in the status and by one Event of the Node object.
func TestPodsContested(t *testing.T) {
	l := newLab(t)
	l.attach()
	l.ready()
	l.await("a problem", func() bool {
		kerneltest.Must(t, kerneltest.FlushNFT())
		return l.says("pods", "another program keeps removing what pods need (rules in table podlace_")
	})
	l.await("an Event", func() bool {
		l.api.mu.Lock()
		defer l.api.mu.Unlock()
		return len(l.api.events) > 0
	})
	for range 20 {
		kerneltest.Must(t, kerneltest.FlushNFT())
		time.Sleep(100 * time.Millisecond)
	}
	l.api.mu.Lock()
	defer l.api.mu.Unlock()
	if e := l.api.events[0]; len(l.api.events) != 1 || e.InvolvedObject.Kind != "Node" || e.InvolvedObject.UID != "uid-"+types.UID(l.Node) ||
		e.Type != corev1.EventTypeWarning || !strings.Contains(e.Message, "podlace_") {
		t.Errorf("%+v", l.api.events)
	}
}

// TestPodsMute: an API server that does not answer keeps no rule from being restored, and the request for the Event ends.
func TestPodsMute(t *testing.T) {
	l := newLab(t)
	l.HTTP, l.times.announce, l.api.Mute = "unix:"+l.dir+"/http", time.Hour, true
	l.attach()
	l.ready()
	restored := func() float64 { _, series := l.scrape(); return series["restored_total"] }
	l.await("an Event", func() bool {
		kerneltest.Must(t, kerneltest.FlushNFT())
		return l.api.countRequests("POST") > 0
	})
	before := restored()
	l.await("a repair", func() bool {
		kerneltest.Must(t, kerneltest.FlushNFT())
		return restored() > before
	})
	l.stop()
	api, err := client(l.Kubeconfig, "", newConnections())
	kerneltest.Must(t, err)
	a, _ := l.steps()
	a.times.announce = time.Millisecond
	a.announce(t.Context(), api, "")
	if l.log.count("context deadline") != 1 { // exceeded, or would be
		t.Error("the time limit is not logged")
	}
}

// TestPodsUnwatched: without the right to listen to removals, the status has a problem.
func TestPodsUnwatched(t *testing.T) {
	l := newLab(t)
	cmd := l.agentCommand()
	without(t, unix.CAP_NET_ADMIN, cmd)
	l.await("the problem", func() bool { return l.says("pods", "not restored until podlace-node restarts", "listen to nftables") })
	kerneltest.Must(t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
}
