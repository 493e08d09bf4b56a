// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// writeKubeletFile writes the kubelet's file with the given claims. Each claim has one pod.
func (l *draLab) writeKubeletFile(claims ...*resourceapi.ResourceClaim) {
	l.Helper()
	var list []claimtest.Claim
	for _, c := range claims {
		n := claimtest.Claim{UID: string(c.UID), Namespace: "shop", Name: c.Name, Pods: []string{"pod-" + string(c.UID)}}
		for _, r := range c.Status.Allocation.Devices.Results {
			n.Devices = append(n.Devices, claimtest.Device{PoolName: r.Pool, DeviceName: r.Device})
		}
		list = append(list, n)
	}
	must(l, claimtest.WriteState(l.options.Kubelet, list...))
}

// TestCollect has a claim disappear from the kubelet's file. Its record is deleted once the API server confirms the end, but not while
// a pod has the VF or the API server does not answer. If the file cannot be read, it stays for ten minutes.
func TestCollect(t *testing.T) {
	other := newClaim("c-9", "web", deviceResult("a", vf0))
	free := newClaim("c-1", "web")
	free.Status.Allocation = nil
	moved := newClaim("c-1", "web", deviceResult("a", vf1))
	for _, c := range []struct {
		title  string
		claim  *resourceapi.ResourceClaim // in the API server; nil: deleted
		noted  bool
		torn   bool // the kubelet's file is unreadable
		inPod  bool
		away   bool // the API server is unreachable
		after  time.Duration
		remain bool
	}{
		{title: "gone", after: 3 * time.Minute},
		{title: "another UID", claim: other, after: 3 * time.Minute},
		{title: "not allocated", claim: free, after: 3 * time.Minute},
		{title: "allocated otherwise", claim: moved, after: 3 * time.Minute},
		{title: "allocated", claim: newClaim("c-1", "web", deviceResult("a", vf0)), after: time.Hour, remain: true},
		{title: "the kubelet knows it", noted: true, after: time.Hour, remain: true},
		{title: "too early", after: time.Minute, remain: true},
		{title: "in a pod", inPod: true, after: time.Hour, remain: true},
		{title: "no API server", away: true, after: time.Hour, remain: true},
		{title: "torn file, too early", torn: true, after: 9 * time.Minute, remain: true},
		{title: "torn file", torn: true, after: 11 * time.Minute},
	} {
		t.Run(c.title, func(t *testing.T) {
			l := newDRALab(t)
			own := newClaim("c-1", "web", deviceResult("a", vf0))
			_, err := l.prepare(t.Context(), own)
			must(t, err)
			l.writeKubeletFile(newClaim("c-7", "unrelated"))
			if c.noted {
				l.writeKubeletFile(own)
			}
			if c.torn {
				must(t, os.WriteFile(filepath.Join(l.options.Kubelet, "dra_manager_state"), []byte("{"), 0o600))
			}
			if c.claim != nil {
				l.addClaims(c.claim)
			}
			if c.inPod {
				l.writeJournal(own, vf0, "web-0", "/proc/self/ns/net")
				defer l.detach(vf0)
			}
			if c.away {
				l.client.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, errors.New("connection refused")
				})
			}
			collector, began := &collector{Driver: l.Driver}, time.Now()
			for at := time.Duration(0); at <= c.after; at += time.Minute {
				collector.collect(t.Context(), began.Add(at))
			}
			if got := l.fileNames(l.options.Claims) == "c-1"; got != c.remain {
				t.Errorf("remains: %t\n%s", got, l.log)
			}
			if n := len(l.client.Actions()); c.noted && n > 0 || n > 61 {
				t.Errorf("%d requests", n)
			}
		})
	}
}

// TestLostRecord checks that a record is rebuilt from its claim after two searches in a row have not found the record.
func TestLostRecord(t *testing.T) {
	l := newDRALab(t)
	c, gone := newClaim("c-1", "web", deviceResult("a", vf0)), newClaim("c-2", "gone", deviceResult("a", vf1))
	l.addClaims(c)
	l.writeKubeletFile(c, gone)
	collector := &collector{Driver: l.Driver}
	collector.rebuild(t.Context())
	if got := l.fileNames(l.options.Claims); got != "" {
		t.Errorf("at once: %s", got)
	}
	collector.rebuild(t.Context())
	if r, err := claim.Read(l.options.Claims, "c-1"); err != nil || r.State != claim.Prepared || l.fileNames(l.options.Claims) != "c-1" {
		t.Errorf("%+v, %v\n%s", r, err, l.log)
	}
	before := len(l.client.Actions())
	for range time.Minute / rebuildEvery {
		collector.rebuild(t.Context())
	}
	if n := len(l.client.Actions()) - before; n > 6 {
		t.Errorf("%d requests in a minute for a claim that is gone", n)
	}
}

// TestNeverPrepared has Prepare refuse a claim repeatedly. The kubelet's file then has the claim without devices, so its record does
// not count as lost.
func TestNeverPrepared(t *testing.T) {
	l := newDRALab(t)
	l.addClaims(newClaim("c-1", "web", deviceResult("a", vf0)))
	must(t, claimtest.WriteState(l.options.Kubelet, claimtest.Claim{UID: "c-1", Namespace: "shop", Name: "web", Pods: []string{"pod-c-1"}}))
	collector := &collector{Driver: l.Driver}
	for range 6 {
		collector.rebuild(t.Context())
	}
	if n := len(l.client.Actions()); n > 0 || l.fileNames(l.options.Claims) != "" || strings.Contains(l.log.String(), "lost") {
		t.Errorf("%d requests, records %s\n%s", n, l.fileNames(l.options.Claims), l.log)
	}
}

// TestLostRecordOfPod checks that the lost claim record of a running pod is rebuilt, and that the pod keeps its VF.
func TestLostRecordOfPod(t *testing.T) {
	l := newDRALab(t, func(o *Options) { o.InUse = func(string) string { return "has its interface in another namespace" } })
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	must(t, claim.Write(l.options.Claims, l.planFor(t, "c-1", vf0).record))
	l.writeJournal(c, vf0, "web-0", "/proc/self/ns/net")
	defer l.detach(vf0)
	must(t, claim.Remove(l.options.Claims, "c-1"))
	if _, err := l.prepare(t.Context(), c); err != nil {
		t.Error(err)
	}
}

// TestLostDriver checks that the VF of a claim with a rebuilt record gets back its former driver, which the daemon derives from the
// resource or the VF's last interface. If both are unknown, the log says what the admin can do.
func TestLostDriver(t *testing.T) {
	for _, c := range []struct {
		title  string
		driver string // driver of the resource
		last   string // driver with the last interface
		want   string
	}{
		{title: "resource", driver: "uio_pci_generic", want: "uio_pci_generic"},
		{title: "last", last: "iavf", want: "iavf"},
		{title: "unknown", want: "vfio-pci"},
	} {
		t.Run(c.title, func(t *testing.T) {
			l := newDRALab(t)
			must(t, os.MkdirAll(filepath.Join(l.sysfs, "bus/pci/drivers/uio_pci_generic"), 0o755))
			pcitest.Kernel{}.Start(t, l.sysfs)
			own := newClaim("c-1", "web", deviceResult("a", vf0))
			own.Status.Allocation.Devices.Config = append(own.Status.Allocation.Devices.Config, fromClass(`"driver":"vfio-pci"`))
			l.addClaims(own)
			l.writeKubeletFile(own)
			_, err := l.prepare(t.Context(), own)
			must(t, err, claim.Remove(l.options.Claims, "c-1"))
			l.updateInventory(pool.Resource{API: pool.DRA, Driver: c.driver}, nil)
			if c.last != "" {
				i := l.latestInventory()
				a, err := pci.ParseAddress(vf0)
				must(t, err)
				i.Last = map[pci.Address]pci.Device{a: {Address: a, Driver: c.last}}
				l.Update(i)
			}
			collector := &collector{Driver: l.Driver}
			collector.rebuild(t.Context())
			collector.rebuild(t.Context())
			must(t, l.unprepare(t.Context(), "c-1"))
			if got := l.driverOf(vf0); got != c.want || strings.Contains(l.log.String(), "is unknown") != (c.title == "unknown") {
				t.Errorf("driver %s, want %s\n%s", got, c.want, l.log)
			}
		})
	}
}
