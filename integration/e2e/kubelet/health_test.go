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
	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/pci/pcitest"
	"github.com/podlace/podlace/pkg/podresources"
)

// allocatable returns the healthy devices of a resource, whether free or allocated.
func allocatable(t *testing.T, of string) ([]allocation.Device, error) {
	t.Helper()
	return podresources.Allocatable(t.Context(), kubeletFor(of))
}

// free returns an error unless the kubelet has this number of free VFs. The kubelet reports the number when it rejects a pod that
// requests too many.
func (l *lab) free(want int) error {
	l.t.Helper()
	name := fmt.Sprint("greedy-", l.started)
	_, message := l.refused(name, vfs(allVFs+1))
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

// health returns the health of a pod's VF in the kubelet's answer.
func (l *lab) health(pod string) string {
	l.t.Helper()
	var all []string
	for _, r := range l.status(pod).Status.ContainerStatuses[0].AllocatedResourcesStatus {
		for _, d := range r.Resources {
			all = append(all, d.Health)
		}
	}
	return strings.Join(all, ",")
}

func (l *lab) becomes(pod, health string) {
	l.t.Helper()
	within(l.t, 30*time.Second, "the VF of pod "+pod+" is "+health, func() error {
		if got := l.health(pod); got != health {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
}

// TestCarrier: the kubelet does not allocate VFs of a PF without carrier, and allocates them again once the carrier is back.
func TestCarrier(t *testing.T) {
	l := newLab(t, "none")
	one := l.runPod("one", vfs(1))[0]
	if err := l.free(allVFs - 1); err != nil {
		t.Fatal(err)
	}
	pf := l.pf(one)
	link, err := filepath.Glob(filepath.Join(pcitest.Folder(t, l.sysfs, pf), "net/*"))
	if err != nil || len(link) != 1 {
		t.Fatal(link, err)
	}
	carrier := "net/" + filepath.Base(link[0]) + "/carrier"
	pcitest.Set(t, l.sysfs, pf, carrier, "0")
	within(t, 20*time.Second, "12 VFs are healthy", func() error { return l.healthy(allVFs - 4) })
	l.becomes("one", "Unhealthy")
	if err := l.free(allVFs - 4); err != nil {
		t.Error(err)
	}
	pcitest.Set(t, l.sysfs, pf, carrier, "1")
	within(t, 30*time.Second, "all VFs are healthy again", func() error { return l.healthy(allVFs) })
	l.becomes("one", "Healthy")
	if err := l.runs("one"); err != nil {
		t.Error(err)
	}
}

// pf returns the PF of a VF.
func (l *lab) pf(vf string) string {
	l.t.Helper()
	path, err := filepath.EvalSymlinks(filepath.Join(l.sysfs, "bus/pci/devices", vf, "physfn"))
	if err != nil {
		l.t.Fatal(err)
	}
	return filepath.Base(path)
}

// healthy returns an error unless this number of VFs is healthy.
func (l *lab) healthy(want int) error {
	devices, err := allocatable(l.t, resource)
	if err == nil && len(devices) != want {
		return fmt.Errorf("%d are", len(devices))
	}
	return err
}

// knows returns an error unless the kubelet's log says that it knows this number of VFs, of which one or all are unhealthy.
func (l *lab) knows(total, healthy int) error {
	lines := l.kubelet.tail("Processed device updates for resource")
	last := lines[strings.LastIndex(strings.TrimSpace(lines), "\n")+1:]
	if want := fmt.Sprintf("totalCount=%d healthyCount=%d", total, healthy); !strings.Contains(last, want) {
		return fmt.Errorf("%s: want %s", last, want)
	}
	return nil
}

// TestLost: a VF that disappears right after its allocation stays in the kubelet's list as unhealthy until the pod ends, and is then
// removed. The pod stays as well, also during a restart of the kubelet.
func TestLost(t *testing.T) {
	node.Skip(t)
	for _, policy := range []string{"none", "single-numa-node"} {
		t.Run(policy, func(t *testing.T) { testLost(t, policy) })
	}
}

func testLost(t *testing.T, policy string) {
	l := newLab(t, policy)
	g := grants{}
	l.grant(g, "one", vfs(1))
	one := g["one"].ids
	pcitest.Remove(t, l.sysfs, one[0])
	within(t, 10*time.Second, "the kubelet has heard of it", func() error { return l.healthy(allVFs - 1) })
	if err := l.knows(allVFs, allVFs-1); err != nil {
		t.Error(err)
	}
	l.becomes("one", "Unhealthy")
	l.named("one", one)
	if list := l.list(); !regexp.MustCompile(`(?m)^` + one[0] + ` .* \(gone\) `).MatchString(list) {
		t.Errorf("podlace sriov ls does not say that %s is gone:\n%s", one[0], list)
	}
	if policy == "none" { // the kubelet refuses the other pods for another reason
		if err := l.free(allVFs - 1); err != nil {
			t.Error(err)
		}
	}
	l.kubelet.end(syscall.SIGTERM)
	l.kubelet.run()
	within(t, 10*time.Second, "the kubelet has heard of it again", func() error { return l.healthy(allVFs - 1) })
	if err := l.knows(allVFs, allVFs-1); err != nil {
		t.Error(err)
	}
	l.kept(g)
	l.remove("one")
	within(t, 30*time.Second, "the kubelet has one VF less", func() error { return l.knows(allVFs-1, allVFs-1) })
}
