// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// TestPodResources: the kubelet's PodResources API reports the driver, pool, device and CDI device of a container's claim.
func TestPodResources(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic", "other")
	l.create(`
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: nic, resourceClaimName: vf}]
  containers: [{resources: {claims: [{name: nic}]}}, {name: stranger}]
`)
	l.runs("web")
	conn, err := grpc.NewClient("unix://"+kubeletRoot+"/pod-resources/kubelet.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer, err := podresources.NewPodResourcesListerClient(conn).Get(t.Context(),
		&podresources.GetPodResourcesRequest{PodName: "web", PodNamespace: l.ns})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, c := range answer.PodResources.Containers {
		for _, d := range c.DynamicResources {
			for _, r := range d.ClaimResources {
				if d.ClaimName != "vf" || d.ClaimNamespace != l.ns || r.DriverName != driverName || r.PoolName != nodeName || len(r.CdiDevices) == 0 {
					t.Errorf("%s: %+v", c.Name, r)
				}
				got[c.Name] = append(got[c.Name], l.address(r.DeviceName))
			}
		}
	}
	if ids := l.allocated("vf"); fmt.Sprint(got) != fmt.Sprint(map[string][]string{"app": ids}) {
		t.Errorf("the kubelet reports %v, want %v", got, ids)
	}
}

// TestStatus: after ADD, the daemon writes the interface, MAC and addresses of each VF into the claim's status. After DEL, it sets their
// condition Ready to False and removes the network data. Other drivers' entries stay.
func TestStatus(t *testing.T) {
	l := newLab(t, setup{})
	l.useConflist(strings.Replace(shippedConflist(), `"type": "sriov",`,
		`"type": "sriov", "ipam": {"type": "host-local", "ranges": [[{"subnet": "198.51.100.0/24"}]]},`, 1))
	l.startStub()
	l.create(`
kind: ResourceClaim
metadata: {name: vf}
spec: {devices: {requests: [` + l.exactly("west", "east") + `, {name: cpus, exactly: {deviceClassName: ` + l.ns + `-cpus}}]}}`)
	l.pod("web", "nic=vf")
	l.pod("guest", "nic=vf") // keeps the claim allocated when web ends
	first, second := "web", "guest"
	within(t, "a pod of the two runs", func() error {
		for _, name := range []string{first, second} {
			if p, err := l.getPod(name); err == nil && isRunning(p) == nil {
				if name == second {
					first, second = second, first
				}
				return nil
			}
		}
		return errors.New("none does")
	})
	ids := l.allocated("vf")
	l.addStubStatus()
	took := within(t, "the status has both VFs", func() error { return l.told(ids, true) })
	t.Logf("the status is there %.1f s after the pod ran", took.Seconds())
	within(t, "the metrics show the pod that has the VFs", func() error { return l.allocatedTo(first, len(ids)) })
	release := l.blockADD()
	l.delete(first)
	within(t, "the status says that no pod has the VFs", func() error { return l.told(ids, false) })
	release()
	l.runs(second)
	within(t, "the status has both VFs again", func() error { return l.told(ids, true) })
	within(t, "the metrics show the second pod", func() error { return l.allocatedTo(second, len(ids)) })
	l.delete(second)
}

// allocatedTo returns an error unless the daemon's metrics contain the given number of VFs of a pod.
func (l *lab) allocatedTo(pod string, want int) error {
	text, err := l.get("/metrics")
	if n := strings.Count(text, fmt.Sprintf("namespace=%q,pod=%q,resource=", l.ns, pod)); err == nil && n != want {
		err = fmt.Errorf("the metrics show %d VFs of pod %s: want %d", n, pod, want)
	}
	return err
}

// addStubStatus writes an entry of the stub's device into the claim's status. It retries, because the daemon may write at the same time.
func (l *lab) addStubStatus() {
	l.Helper()
	within(l.T, "the stub's entry is in the status", func() error {
		c := l.getClaim("vf")
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Driver == stubDriver {
				c.Status.Devices = append(c.Status.Devices, resourceapi.AllocatedDeviceStatus{Driver: r.Driver, Pool: r.Pool, Device: r.Device})
			}
		}
		_, err := l.client.ResourceV1().ResourceClaims(l.ns).UpdateStatus(l.background(), c, metav1.UpdateOptions{})
		return err
	})
}

// told returns an error unless the claim's status has one entry of the stub, and one for each VF with the expected condition Ready.
func (l *lab) told(ids []string, ready bool) error {
	c := l.getClaim("vf")
	found, stubs := map[string]resourceapi.AllocatedDeviceStatus{}, 0
	for _, d := range c.Status.Devices {
		if d.Driver == driverName {
			found[d.Device] = d
		} else {
			stubs++
		}
	}
	if len(found) != len(ids) || stubs != 1 {
		return fmt.Errorf("%+v", c.Status.Devices)
	}
	for n, id := range ids {
		d := found[deviceName(id)]
		isReady := len(d.Conditions) == 1 && d.Conditions[0].Type == "Ready" && d.Conditions[0].Status == metav1.ConditionTrue
		switch {
		case isReady != ready:
			return fmt.Errorf("%s: %+v", id, d)
		case !ready && (len(d.Conditions) != 1 || d.Conditions[0].Status != metav1.ConditionFalse || d.NetworkData != nil):
			return fmt.Errorf("%s: %+v: want the condition Ready False, and no data of a network", id, d)
		case !ready:
			continue
		case d.NetworkData == nil || d.Data == nil:
			return fmt.Errorf("%s: %+v", id, d)
		}
		if got := d.NetworkData; got.InterfaceName != fmt.Sprint("net", n+1) || got.HardwareAddress != l.before[id].MAC || len(got.IPs) != 1 ||
			!strings.HasPrefix(got.IPs[0], "198.51.100.") || !strings.Contains(string(d.Data.Raw), id) {
			return fmt.Errorf("%s: %+v, %s", id, got, d.Data.Raw)
		}
	}
	return nil
}

// useConflist installs a conflist as the runtime's configuration until the test ends.
func (l *lab) useConflist(text string) {
	l.Helper()
	set := func(text string) {
		if err := writeConflist(text); err != nil {
			l.Fatal(err)
		}
		l.restartService("containerd")
		within(l.T, "containerd runs again", func() error { return exec.Command("ctr", "--namespace", "k8s.io", "containers", "list").Run() })
	}
	set(text)
	l.Cleanup(func() { set(shippedConflist()) })
}

// restartService ends a program of the node; scripts/node.sh then starts it again.
func (l *lab) restartService(name string) {
	l.Helper()
	former := servicePID(name)
	if err := syscall.Kill(former, syscall.SIGTERM); err != nil || former == 0 {
		l.Fatalf("%s has PID %d: %v", name, former, err)
	}
	within(l.T, name+" is another process", func() error {
		if now := servicePID(name); now == former || now == 0 || syscall.Kill(now, 0) != nil {
			return errors.New("it has not ended")
		}
		return nil
	})
}

func (l *lab) background() context.Context { return context.Background() }
