// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/poddevices"
)

const resourceOne = "example.com/one"

// writeCheckpoint writes the kubelet's checkpoint; each entry is a pod's UID, a container and a device ID.
func (l *testLab) writeCheckpoint(entries ...[3]string) {
	l.Helper()
	var list []string
	for _, e := range entries {
		list = append(list, `{"PodUID":"`+e[0]+`","ContainerName":"`+e[1]+`","ResourceName":"`+resourceOne+`","DeviceIDs":{"0":["`+e[2]+
			`"]},"AllocResp":""}`)
	}
	text := "null"
	if list != nil {
		text = "[" + strings.Join(list, ",") + "]"
	}
	write(l.T, filepath.Join(l.kubelet.dir, checkpointName), `{"Data":{"PodDeviceEntries":`+text+`,"RegisteredDevices":{}},"Checksum":1}`)
}

// awaitAnswer asks about a pod until the answer has no error, or one with the given text. As an error comes only at the end of the time
// limit, it doubles this after each attempt for slow machines.
func (l *testLab) awaitAnswer(d *daemon, pod, uid, says string) (a poddevices.Answer) {
	l.Helper()
	limit := 50 * time.Millisecond
	for until := time.Now().Add(maxWait); time.Now().Before(until); limit *= 2 {
		ctx, cancel := context.WithTimeout(l.Context(), limit)
		a = d.answerQuestion(ctx, poddevices.Question{Namespace: "shop", Pod: pod, UID: uid, Resources: []string{resourceOne}})
		cancel()
		if a.Error == "" || says != "" && strings.Contains(a.Error, says) {
			break
		}
	}
	return a
}

// openForTest returns a daemon that serves its endpoints, and does all else only when the test calls it.
func (l *testLab) openForTest() *daemon {
	l.Helper()
	ctx, cancel := context.WithCancel(l.Context())
	d, err := openDaemon(ctx, l.daemonOptions, quiet())
	if err != nil {
		l.Fatal(err)
	}
	d.refresh(ctx)
	l.Cleanup(func() { cancel(); d.running.Wait() })
	return d
}

func (l *testLab) allocate(d *daemon, ids ...string) {
	l.Helper()
	if _, err := d.serving[resourceOne].Allocate(l.Context(), allocating(ids...)); err != nil {
		l.Fatal(err)
	}
}

// TestHandedOut checks that no pod is said to have no devices before the containers of all allocated devices are known. An init
// container's device is only in the kubelet's checkpoint, where its entry may get lost.
func TestHandedOut(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	for _, pod := range []string{"web", "plain"} {
		l.kubelet.assignDevices("shop", pod, "app", resourceOne)
	}
	d := l.openForTest()
	expect := func(what, pod, uid, says string) {
		t.Helper()
		a := l.awaitAnswer(d, pod, uid, says)
		if certain := a.Error == ""; len(a.Devices) > 0 || certain != (says == "") || !strings.Contains(a.Error, says) {
			t.Errorf("%s: %s: %+v: want %q", what, pod, a, says)
		}
	}
	const mine = "may have " + vf00 + ": the device was allocated, but the kubelet lists no container that has it"
	l.writeCheckpoint([3]string{"u-old", "app", vf00})
	expect("no device was allocated", "plain", "u-plain", "")
	l.allocate(d, vf00)
	expect("no container has it", "web", "u-web", mine)
	expect("no container has it", "plain", "u-plain", mine)
	l.writeCheckpoint([3]string{"u-web", "init", vf00})
	expect("it is noted for the pod", "web", "u-web", "another pod of the same name")
	expect("it is noted for another", "plain", "u-plain", "")
	l.writeCheckpoint()
	expect("the entry is lost", "web", "u-web", mine)
	expect("the entry is lost", "plain", "u-plain", "")
	l.allocate(d, vf00)
	expect("it was allocated again", "plain", "u-plain", mine)
	d.gate.allocations.learnOwners(time.Now().Add(-time.Hour), []poddevices.Device{{Resource: resourceOne, ID: vf00}})
	expect("an answer of before names the former container", "plain", "u-plain", mine)
	l.kubelet.assignDevices("shop", "db", "app", resourceOne, vf00)
	expect("the kubelet tells whose it is", "plain", "u-plain", "")
	expect("the kubelet tells whose it is", "web", "u-web", "")
	l.allocate(d, vf01)
	expect("another device was allocated", "plain", "u-plain", strings.ReplaceAll(mine, vf00, vf01))
	out := d.gate.allocations.devices[vf01]
	out.at = out.at.Add(-maxUnlisted)
	d.gate.allocations.devices[vf01] = out
	expect("no container had it in the minute since", "plain", "u-plain", "")
}

// TestOtherPod checks that devices under a pod's name are returned only for the UID of that pod. For another UID, the answer is an
// error, because they may belong to an earlier pod of the same name.
func TestOtherPod(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-0", "app", resourceOne, vf00)
	d := l.openForTest()
	expect := func(what, uid, says string) {
		t.Helper()
		a := l.awaitAnswer(d, "web-0", uid, says)
		if has := len(a.Devices) == 1 && a.Devices[0].ID == vf00; has != (says == "") || !strings.Contains(a.Error, says) {
			t.Errorf("%s: %+v", what, a)
		}
	}
	l.writeCheckpoint([3]string{"u-0", "app", vf00})
	expect("the pod", "u-0", "")
	expect("a runtime that tells no UID", "", "")
	expect("another pod of its name, without devices", "u-1", "another pod of the same name")
	l.writeCheckpoint([3]string{"u-0", "app", vf00}, [3]string{"u-1", "app", vf01})
	expect("another pod of its name, with another device", "u-1", "another pod of the same name")
	if err := os.Remove(filepath.Join(l.kubelet.dir, checkpointName)); err != nil {
		t.Fatal(err)
	}
	expect("no checkpoint", "u-0", "")
}

// TestFailedAdmission checks that questions about pods without devices do not exhaust the kubelet's rate limit while an allocated
// device's container is unknown. The daemon requests the list of all pods at most once per sharedInterval for all questions, and each
// pod at most once. Each such pod gets an error with the ID of the allocated device.
func TestFailedAdmission(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	const pods = 40
	for i := range pods {
		l.kubelet.assignDevices("shop", fmt.Sprint("plain-", i), "app", resourceOne)
	}
	d := l.openForTest()
	l.writeCheckpoint()
	l.allocate(d, vf00)
	l.kubelet.limitRate()
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var all sync.WaitGroup
	for i := range pods {
		all.Go(func() {
			a := d.answerQuestion(ctx, poddevices.Question{Namespace: "shop", Pod: fmt.Sprint("plain-", i), UID: fmt.Sprint("u-", i),
				Resources: []string{resourceOne}})
			if !strings.Contains(a.Error, "may have "+vf00) || a.Cause != poddevices.ErrUncertain && !strings.Contains(a.Error, "ask the kubelet") {
				t.Errorf("%+v", a)
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	l.kubelet.mu.Lock()
	defer l.kubelet.mu.Unlock()
	if lists := l.kubelet.told["List"]; lists > int(took/sharedInterval)+2 {
		t.Errorf("all pods were listed %d times in %s", lists, took)
	}
	if gets := l.kubelet.told["Get"]; gets > pods {
		t.Errorf("%d questions about %d pods", gets, pods)
	}
}

// TestRefusedToTheEnd has a kubelet that refuses everything until the deadline. If the pod may have a device, its ID is in the error.
func TestRefusedToTheEnd(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	d := l.openForTest()
	l.allocate(d, vf00)
	l.kubelet.mu.Lock()
	l.kubelet.limited, l.kubelet.told, l.kubelet.began = true, map[string]int{"Get": 10}, time.Now().Add(time.Hour)
	l.kubelet.mu.Unlock()
	if a := l.awaitAnswer(d, "plain", "u-plain", "may have"); !strings.Contains(a.Error, "may have "+vf00) ||
		!strings.Contains(a.Error, "ask the kubelet") {
		t.Errorf("%+v", a)
	}
}

// TestUnreadableAtAllocate checks that only PodResources identifies a device's owner if the checkpoint was unreadable during Allocate.
// The device's entry in a later one may belong to a pod that has ended.
func TestUnreadableAtAllocate(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "plain", "app", resourceOne)
	d := l.openForTest()
	write(t, l.checkpointPath(), `{"Data":`)
	l.allocate(d, vf00)
	l.writeCheckpoint([3]string{"u-old", "app", vf00})
	if a := l.awaitAnswer(d, "plain", "u-plain", "may have"); !strings.Contains(a.Error, "may have "+vf00) {
		t.Errorf("%+v", a)
	}
	l.kubelet.assignDevices("shop", "db", "app", resourceOne, vf00)
	if a := l.awaitAnswer(d, "plain", "u-plain", ""); a.Error != "" || len(a.Devices) > 0 {
		t.Errorf("the kubelet tells whose it is: %+v", a)
	}
}

// TestFormerCheckpoint checks that a checkpoint that may have been read before the allocation is ignored, because it may have an
// earlier owner.
func TestFormerCheckpoint(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	d := l.openForTest()
	l.writeCheckpoint()
	before := time.Now()
	l.allocate(d, vf00)
	l.writeCheckpoint([3]string{"u-other", "app", vf00})
	all := []string{resourceOne}
	if d.gate.allocations.learnOwners(before, nil); len(d.gate.allocations.possibleDevices("u-plain", all)) != 1 {
		t.Error("a checkpoint from before the allocation counts")
	}
	if d.gate.allocations.learnOwners(time.Now(), nil); len(d.gate.allocations.possibleDevices("u-plain", all)) != 0 {
		t.Error("a checkpoint from after the allocation does not count")
	}
}

// TestAskBesideRefresh checks that questions are answered during a refresh, for all resources.
func TestAskBesideRefresh(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web", "app", resourceOne, vf00)
	d := l.openForTest()
	l.writeCheckpoint([3]string{"u-web", "app", vf00})
	l.allocate(d, vf00, vf01)
	asked := make(chan struct{})
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			for range 10 {
				d.gate.allocations.possibleDevices("u-web", d.resourceNames())
				time.Sleep(time.Millisecond) // give refresh a chance to run
			}
			if a := d.answerQuestion(t.Context(), poddevices.Question{Namespace: "shop", Pod: "web", UID: "u-web"}); a.Error != "" ||
				len(a.Devices) != 1 {
				t.Errorf("%+v", a)
			}
		})
	}
	go func() { all.Wait(); close(asked) }()
	done := time.After(maxWait)
	for answered := false; !answered; {
		refreshed := make(chan struct{})
		go func() { d.refresh(t.Context()); close(refreshed) }()
		select {
		case <-refreshed:
		case <-done:
			panic("refresh and the questions wait for each other") // a return would hang: the daemon could not be closed
		}
		select {
		case <-asked:
			answered = true
		default:
			time.Sleep(time.Millisecond)
		}
	}
}

// TestNodeAnswer checks the answer about what the kubelet can assign, also of other device plugins.
func TestNodeAnswer(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "db", "app", "example.com/gpu", "g0")
	d := l.openForTest()
	want := poddevices.Answer{Node: poddevices.Node{Devices: []poddevices.Assignable{{Resource: "example.com/gpu", ID: "g0", Taken: true}},
		CPUs: []int64{15, 16, 17}, TakenCPUs: []int64{16, 17}}}
	if diff := cmp.Diff(want, d.answerQuestion(t.Context(), poddevices.Question{Node: true})); diff != "" {
		t.Error(diff)
	}
	l.kubelet.kill()
	if a := d.answerQuestion(t.Context(), poddevices.Question{Node: true}); !strings.Contains(a.Error, "ask the kubelet") {
		t.Errorf("without a kubelet: %+v", a)
	}
}
