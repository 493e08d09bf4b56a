// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/store"
)

func TestPrintStatus(t *testing.T) {
	s := Status{Node: "n1", Ready: true, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, MTU: 1450}
	s.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	s.Peers = []PeerStatus{{Name: "n2", PodCIDR: netip.MustParsePrefix("10.244.2.0/24"), Gateway: netip.MustParseAddr("192.0.2.2"),
		State: noderoutes.Direct},
		{Name: "n3", State: noderoutes.Refused, Reason: "it has no podCIDR"},
		{Name: "n4", State: noderoutes.Conflict, Reason: "same podCIDR"}}
	s.Problems = peerProblems(s.Peers)
	var short, long bytes.Buffer
	kerneltest.Must(t, printStatus(&short, s, false), printStatus(&long, s, true))
	want := `node      n1, ready
pods      10.244.1.0/24
cluster   10.244.0.0/16
mtu       1450
peers     3 nodes; podCIDRs: 1 direct, 1 refused, 1 conflict

PROBLEM   WHY                          WHAT TO DO
node n3   refused: it has no podCIDR   correct the Node object or the configuration (offLink, addressCIDRs)
node n4   conflict: same podCIDR       delete the younger Node object (kubectl delete node n4), and restart its kubelet
`
	if short.String() != want {
		t.Errorf("got\n%swant\n%s", short.String(), want)
	}
	if !strings.Contains(long.String(), "n2     10.244.2.0/24   192.0.2.2   direct") {
		t.Errorf("got\n%s", long.String())
	}
}

// TestStatusFile: the file is written at most once per second, and only if the status changed.
func TestStatusFile(t *testing.T) {
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(store.Root)) })
	var f statusFile
	now := time.Now()
	write := func(node string, at time.Time, later bool) {
		t.Helper()
		again, err := f.write(Status{Node: node, Ready: true}, at)
		if err != nil || again.IsZero() == later {
			t.Errorf("%s: again at %v, %v", node, again, err)
		}
	}
	write("a", now, false)
	write("a", now, false)
	write("b", now.Add(100*time.Millisecond), true)
	write("b", now.Add(time.Second), false)
	kerneltest.Must(t, os.Remove(store.Root+"/"+statusName)) // by another program
	write("b", now.Add(2*time.Second), false)
	var out bytes.Buffer
	exit, err := showStatus(&out, true, false)
	var s Status
	if err != nil || json.Unmarshal(out.Bytes(), &s) != nil || s.Node != "b" || exit != exitProblems {
		t.Errorf("exit %d, %v: %s", exit, err, out.String())
	}
	unlock, err := lockNode(t.Context(), nil)
	kerneltest.Must(t, err)
	if exit, err := showStatus(&out, false, false); exit != exitFine || err != nil {
		t.Errorf("exit %d, %v: %s", exit, err, out.String())
	}
	unlock()
	kerneltest.Must(t, os.WriteFile(store.Root+"/"+statusName, []byte("{"), 0o600))
	if exit, err := showStatus(&out, false, false); exit != exitUnknown || err == nil {
		t.Errorf("a torn file: exit %d, %v", exit, err)
	}
}

// TestAlarm: wait merges simultaneous causes. It waits longer if all may come from other programs, but not if the cluster also changes.
func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAlarm()
		a.wake(onKernel)
		a.wake(onKernel)
		time.AfterFunc(10*time.Millisecond, func() { a.wake(onFiles) })
		began := time.Now()
		if causes := a.wait(t.Context(), began.Add(time.Hour), coalescing, 0); len(causes) != 2 || mainCause(causes) != onKernel ||
			time.Since(began) != coalescing {
			t.Errorf("%v after %v", causes, time.Since(began))
		}
		a.wake(onKernel)
		time.AfterFunc(10*time.Millisecond, func() { a.wake(onAPI) })
		if causes := a.wait(t.Context(), began.Add(time.Hour), coalescing, time.Hour); len(causes) != 2 || mainCause(causes) != onAPI {
			t.Errorf("%v", causes)
		}
		if causes := a.wait(t.Context(), time.Now(), coalescing, time.Hour); len(causes) != 0 {
			t.Errorf("%v at the deadline", causes)
		}
	})
}
