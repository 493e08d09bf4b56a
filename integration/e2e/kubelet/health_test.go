// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/poddevices"
)

// allocatableDevices returns the healthy devices of a resource, including the allocated devices.
func allocatableDevices(t *testing.T, of string) ([]poddevices.Device, error) {
	t.Helper()
	devices, _, err := podresources.Allocatable(t.Context(), kubeletFor(of))
	return devices, err
}

// checkFree returns an error unless the kubelet has this many free VFs, which its reason for rejecting a pod with too many contains.
func (l *testLab) checkFree(want int) error {
	l.t.Helper()
	name := fmt.Sprint("greedy-", l.started)
	_, message := l.runRefused(name, vfs(allVFs+1))
	for _, text := range []string{`Requested: \d+, Available: (\d+)`, `no healthy devices present`, `cannot allocate unhealthy devices`} {
		m := regexp.MustCompile(text).FindStringSubmatch(message)
		switch {
		case m == nil:
			continue
		case len(m) == 1 && want == 0, len(m) == 2 && m[1] == strconv.Itoa(want):
			return nil
		}
	}
	return fmt.Errorf("%s: want %d", message, want)
}

// podHealth returns the health of a pod's VFs as the kubelet reports it.
func (l *testLab) podHealth(pod string) string {
	l.t.Helper()
	var all []string
	for _, r := range l.statusOf(pod).Status.ContainerStatuses[0].AllocatedResourcesStatus {
		for _, d := range r.Resources {
			all = append(all, d.Health)
		}
	}
	return strings.Join(all, ",")
}

func (l *testLab) becomes(pod, health string) {
	l.t.Helper()
	checkWithin(l.t, 30*time.Second, "the VF of pod "+pod+" is "+health, func() error {
		if got := l.podHealth(pod); got != health {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
}

// TestCarrier: the kubelet does not allocate the VFs of a PF while the PF has no carrier.
func TestCarrier(t *testing.T) {
	l := newLab(t, "none")
	one := l.runPod("one", vfs(1))[0]
	if err := l.checkFree(allVFs - 1); err != nil {
		t.Fatal(err)
	}
	pf := l.pfOf(one)
	link, err := filepath.Glob(filepath.Join(pcitest.Folder(t, l.sysfs, pf), "net/*"))
	if err != nil || len(link) != 1 {
		t.Fatal(link, err)
	}
	carrier := "net/" + filepath.Base(link[0]) + "/carrier"
	pcitest.Set(t, l.sysfs, pf, carrier, "0")
	checkWithin(t, 20*time.Second, "12 VFs are healthy", func() error { return l.checkHealthy(allVFs - 4) })
	l.becomes("one", "Unhealthy")
	if err := l.checkFree(allVFs - 4); err != nil {
		t.Error(err)
	}
	pcitest.Set(t, l.sysfs, pf, carrier, "1")
	checkWithin(t, 30*time.Second, "all VFs are healthy again", func() error { return l.checkHealthy(allVFs) })
	l.becomes("one", "Healthy")
	if err := l.runs("one"); err != nil {
		t.Error(err)
	}
}

// pfOf returns the PF of a VF.
func (l *testLab) pfOf(vf string) string {
	l.t.Helper()
	path, err := filepath.EvalSymlinks(filepath.Join(l.sysfs, "bus/pci/devices", vf, "physfn"))
	if err != nil {
		l.t.Fatal(err)
	}
	return filepath.Base(path)
}

// checkHealthy returns an error unless the given number of VFs is healthy.
func (l *testLab) checkHealthy(want int) error {
	devices, err := allocatableDevices(l.t, resource)
	if err == nil && len(devices) != want {
		return fmt.Errorf("%d are", len(devices))
	}
	return err
}

// checkLogged returns an error unless the kubelet's log reports these numbers of VFs and healthy VFs.
func (l *testLab) checkLogged(total, healthy int) error {
	lines := l.testKubelet.tailLog("Processed device updates for resource")
	last := lines[strings.LastIndex(strings.TrimSpace(lines), "\n")+1:]
	if want := fmt.Sprintf("totalCount=%d healthyCount=%d", total, healthy); !strings.Contains(last, want) {
		return fmt.Errorf("%s: want %s", last, want)
	}
	return nil
}

// TestLost: a VF that disappears right after its allocation is listed as unhealthy until the pod ends, and then removed. The pod keeps
// running, also during a restart of the kubelet.
func TestLost(t *testing.T) {
	node.Skip(t)
	for _, policy := range []string{"none", "single-numa-node"} {
		t.Run(policy, func(t *testing.T) { testLost(t, policy) })
	}
}

func testLost(t *testing.T, policy string) {
	l := newLab(t, policy)
	g := podGrants{}
	l.grantVFs(g, "one", vfs(1))
	one := g["one"].ids
	pcitest.Remove(t, l.sysfs, one[0])
	checkWithin(t, 10*time.Second, "the kubelet has heard of it", func() error { return l.checkHealthy(allVFs - 1) })
	if err := l.checkLogged(allVFs, allVFs-1); err != nil {
		t.Error(err)
	}
	l.becomes("one", "Unhealthy")
	l.checkReported("one", one)
	if list := l.listDevices(); !regexp.MustCompile(`(?m)^` + one[0] + ` .* \(gone\) `).MatchString(list) {
		t.Errorf("podlace sriov ls does not say that %s is gone:\n%s", one[0], list)
	}
	if policy == "none" { // the kubelet refuses the other pods for another reason
		if err := l.checkFree(allVFs - 1); err != nil {
			t.Error(err)
		}
	}
	l.testKubelet.endProgram(syscall.SIGTERM)
	l.runKubelet()
	checkWithin(t, 10*time.Second, "the kubelet has heard of it again", func() error { return l.checkHealthy(allVFs - 1) })
	if err := l.checkLogged(allVFs, allVFs-1); err != nil {
		t.Error(err)
	}
	l.checkKept(g)
	l.removePods("one")
	checkWithin(t, 30*time.Second, "the kubelet has one VF less", func() error { return l.checkLogged(allVFs-1, allVFs-1) })
}
