// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

// TestRepeats: a failure is logged at once, then after growing pauses of at most an hour, and again with another text or after a
// success.
func TestRepeats(t *testing.T) {
	var r repeatLimit
	began := time.Now()
	var at []int // in minutes
	for m := range 300 {
		if r.isDue("a", errors.New("busy"), began.Add(time.Duration(m)*time.Minute)) {
			at = append(at, m)
		}
	}
	if want := []int{0, 1, 3, 7, 15, 31, 63, 123, 183, 243}; !cmp.Equal(at, want) {
		t.Errorf("logged at the minutes %v, want %v", at, want)
	}
	now := began.Add(300 * time.Minute)
	if !r.isDue("a", errors.New("gone"), now) || r.isDue("a", errors.New("gone"), now) || !r.isDue("b", errors.New("gone"), now) {
		t.Error("a failure with another text, or of another claim, is a new one")
	}
	if r.isDue("a", nil, now) || !r.isDue("a", errors.New("gone"), now) {
		t.Error("a success ends a failure")
	}
	if r.isDue("c", errors.New("x"), now.Add(3*longestRepeat)); len(r.of) != 1 {
		t.Errorf("%d failures of callers that have given up", len(r.of)-1)
	}
}

// TestFailureUnprepareHangs: if the unbind of a claim's driver hangs, the collector stops waiting after callTimeout, and the claim
// keeps its record.
func TestFailureUnprepareHangs(t *testing.T) {
	l := newDRALab(t)
	kernel := pcitest.Kernel{Stuck: []string{"vfio-pci"}}
	kernel.Start(t, l.sysfs)
	p := l.planFor(t, "c-1", vf0)
	p.devices[0].driver, p.devices[0].restores = "vfio-pci", true
	must(t, l.reserve(t.Context(), &p, nil))
	l.writeKubeletFile(newClaim("c-7", "unrelated"))
	l.callTimeout = 50 * time.Millisecond
	c, began := &collector{Driver: l.Driver}, time.Now()
	c.missing = map[string]time.Time{"c-1": began.Add(-time.Hour)}
	for range 3 {
		c.collect(t.Context(), began)
	}
	if took := time.Since(began); took > maxWait || l.fileNames(l.options.Claims) != "c-1" {
		t.Errorf("it took %s; records: %s", took, l.fileNames(l.options.Claims))
	}
	if !strings.Contains(l.log.String(), "and keeps its devices") {
		t.Errorf("not logged:\n%s", l.log)
	}
}

// TestUnprepareLog: the kubelet repeats a failing unprepare many times, which is logged once.
func TestUnprepareLog(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	must(t, claim.MakeFolder(l.options.Claims), os.WriteFile(l.options.Claims+"/c-1", []byte("{"), 0o600))
	for range 5 {
		if got := k.unprepareClaims("c-1"); got[0] == "" {
			t.Error("the record cannot be read, and the claim was unprepared")
		}
	}
	if n := strings.Count(l.log.String(), "which keeps its devices"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, l.log)
	}
}

// TestUnattached: if no pod attaches a claim's device, this is logged once, 2 to 2.5 minutes after Prepare, and counted in a metric
// until a pod does.
func TestUnattached(t *testing.T) {
	registry := prometheus.NewRegistry()
	l := newDRALab(t, func(o *Options) { o.Metrics = registry })
	own := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(own)
	count := func() float64 { return gatheredValue(t, registry, "podlace_sriov_claims_unattached") }
	logged := func() int { return strings.Count(l.log.String(), "no pod has attached a device") }
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go l.collectLoop(ctx)
		time.Sleep(61 * time.Second) // directly after a search
		_, err := l.prepare(ctx, own)
		must(t, err)
		l.writeKubeletFile(own)
		time.Sleep(unattachedAfter - time.Second)
		if count() != 0 || logged() != 0 {
			t.Errorf("counted %v and logged %d times before two minutes", count(), logged())
		}
		time.Sleep(31 * time.Second)
		if count() != 1 || logged() != 1 {
			t.Errorf("counted %v and logged %d times 150 s after Prepare:\n%s", count(), logged(), l.log)
		}
		l.writeJournal(own, vf0, "web-0", "/proc/self/ns/net")
		defer l.detach(vf0)
		time.Sleep(time.Minute)
		if count() != 0 || logged() != 1 {
			t.Errorf("counted %v and logged %d times after ADD", count(), logged())
		}
	})
}

// TestUnattachedVFIO checks that a device with a user space driver counts as attached, because a pod uses it without an interface.
func TestUnattachedVFIO(t *testing.T) {
	l := newDRALab(t, func(o *Options) { o.CDI = t.TempDir() })
	pcitest.Kernel{}.Start(t, l.sysfs)
	l.updateInventory(pool.Resource{Driver: "vfio-pci"}, nil)
	own := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(own)
	if _, err := l.prepare(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	l.updateInventory(pool.Resource{Driver: "vfio-pci"}, nil) // the next scan finds the new driver
	c := &collector{Driver: l.Driver}
	now := time.Now()
	c.findUnattached(now)
	c.findUnattached(now.Add(unattachedAfter))
	if l.driverOf(vf0) != "vfio-pci" || len(c.unattached) > 0 {
		t.Errorf("the driver is %s; unattached: %v", l.driverOf(vf0), c.unattached)
	}
}
