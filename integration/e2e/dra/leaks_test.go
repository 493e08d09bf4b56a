// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestForceDelete (failure 11): another pod gets the VF of a pod deleted by force only after that one has released it.
func TestForceDelete(t *testing.T) {
	l := newLab(t, setup{})
	l.template("most", "a", "b", "c", "d", "e", "f", "g")
	l.template("vf", "nic")
	l.pod("most", "nics=+most")
	l.create("{kind: Pod, metadata: {name: slow}, spec: {terminationGracePeriodSeconds: 5, " + claimList([]string{"nic=+vf"}) +
		`, containers: [{command: [/bin/sh, -c, 'echo "interfaces:" $(ls /sys/class/net); trap : TERM; while :; do sleep 1; done']}]}}`)
	l.runs("most")
	l.runs("slow")
	ids := l.allocated(l.claimOf("slow", "nic"))
	l.pod("next", "nic=+vf")
	l.event("next", "cannot allocate all claims")
	now := int64(0)
	if err := l.client.CoreV1().Pods(l.ns).Delete(t.Context(), "slow", metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	l.runs("next")
	if got := l.allocated(l.claimOf("next", "nic")); !slices.Equal(got, ids) {
		t.Fatalf("the next pod has %v: want %v", got, ids)
	}
	l.attached("next", ids...)
	for _, m := range l.events("next") {
		if strings.Contains(m, "still belongs to") {
			t.Logf("event of the next pod: %s", m)
		}
	}
}

// script replaces the sriov plugin by a shell script until the returned function is called. REAL is the path of the real one.
func (l *lab) script(text string) (restore func()) {
	l.Helper()
	const at = "/opt/cni/bin/sriov"
	const real, new = at + ".real", at + ".new"
	_ = os.Remove(real) // the plugin of an earlier test: the script of this test may still call the plugin
	text = "#!/bin/sh\nREAL=" + real + "\n" + text
	if err := errors.Join(os.Link(at, real), os.WriteFile(new, []byte(text), 0o755), os.Rename(new, at)); err != nil {
		l.Fatal(err)
	}
	done := false
	restore = func() {
		if !done {
			if err := errors.Join(os.Link(real, new), os.Rename(new, at)); err != nil {
				l.Error(err)
			}
		}
		done = true
	}
	l.Cleanup(restore)
	return restore
}

// TestDelFails (failure 15): while DEL fails, the pod does not end, its claim remains prepared, and the runtime retries.
func TestDelFails(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	restore := l.script(`[ "$CNI_COMMAND" != DEL ] || { echo '{"cniVersion":"1.0.0","code":11,"msg":"busy"}'; exit 1; }` + "\nexec $REAL\n")
	if err := l.client.CoreV1().Pods(l.ns).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	l.event("web", "busy")
	if got := journals(); !slices.Equal(got, ids) || l.noRecords() == nil {
		t.Errorf("journals of %v: want %v; %v", got, ids, l.noRecords())
	}
	restore()
	l.gone("web")
	within(t, "the VF is home", func() error { return errors.Join(l.noRecords(), l.allHome()) })
}

// TestNoDel (failure 16): when a pod ends without a DEL, the daemon restores the VF as the kubelet unprepares the claim. With its
// namespace, the kernel would move a VF to the node but delete the veth that stands for it here, so the test moves it, under the name that
// it has in the pod.
func TestNoDel(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	folder := filepath.Join(pcitest.Folder(t, l.sysfs, l.allocated("vf")[0]), "net", "net1")
	restore := l.script(`if [ "$CNI_COMMAND" = DEL ]; then
	nsenter --net="$CNI_NETNS" ip link set net1 netns 1 && mkdir -p ` + folder + ` && echo 1 >` + folder + `/type
	exit 0
fi
exec $REAL
`)
	l.delete("web")
	if err := errors.Join(l.noRecords(), l.allHome()); err != nil {
		t.Error(err)
	}
	restore()
}

// TestOrphanedRecord (failure 12): the daemon removes the record of a deleted claim that the kubelet does not know, which frees the VF.
func TestOrphanedRecord(t *testing.T) {
	l := newLab(t, setup{})
	uid := "8d2f6a34-0000-4000-8000-000000000001"
	r := claim.Record{State: claim.Prepared, Writer: "test", Reserved: []claim.Consumer{{Resource: "pods", Name: "web", UID: "none"}},
		Devices: []poddevices.Device{{Resource: resource, ID: l.ids[0], Claim: &poddevices.Claim{UID: uid, Namespace: l.ns, Name: "vf",
			Request: "nic", Pool: nodeName, Device: deviceName(l.ids[0])}}}}
	if err := claim.Write(claimRecords, r); err != nil {
		t.Fatal(err)
	}
	l.template("all", "a", "b", "c", "d", "e", "f", "g", "h")
	l.pod("web", "nic=+all")
	t.Logf("event of the pod: %.300s", l.event("web", "still belongs to claim "+l.ns+"/vf"))
	begin := time.Now()
	isGone := func() error { return gone(filepath.Join(claimRecords, uid)) }
	err := try(isGone)
	for range 2 { // the daemon waits for 2 minutes, and checks each minute
		if err != nil {
			err = try(isGone)
		}
	}
	if err != nil {
		t.Fatalf("the record is there after %.0f s", time.Since(begin).Seconds())
	}
	l.Logf("the record was collected after %.0f s", time.Since(begin).Seconds())
	l.runs("web")
	l.attached("web", l.allocated(l.claimOf("web", "nic"))...)
}

func gone(path string) error {
	if _, err := os.Stat(path); err == nil {
		return fmt.Errorf("there is %s", path)
	}
	return nil
}
