// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// recordDamage is a way to make a record unreadable. Podlace's report contains reason.
type recordDamage struct {
	of     func(path string, data []byte) error
	reason string
}

func overwriteWith(f func(data []byte) []byte) func(path string, data []byte) error {
	return func(path string, data []byte) error { return os.WriteFile(path, f(data), 0o600) }
}

var unreadable = map[string]recordDamage{
	"torn":   {overwriteWith(func(data []byte) []byte { return data[:len(data)/2] }), "unexpected end of JSON input"},
	"empty":  {overwriteWith(func([]byte) []byte { return nil }), "it is empty"},
	"zeroed": {overwriteWith(func(data []byte) []byte { return make([]byte, len(data)) }), "invalid character"},
	"of a newer one": {overwriteWith(func(data []byte) []byte {
		return bytes.Replace(data, []byte(`"format":1`), []byte(`"format":2`), 1)
	}), "its format is 2"},
	"of another pod": {overwriteWith(func(data []byte) []byte {
		return bytes.ReplaceAll(data, []byte(`"containerID":"`+victimID), []byte(`"containerID":"ghost`))
	}), "it belongs to another attachment"},
	"a folder": {func(path string, _ []byte) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) }, "is a directory"},
	"a FIFO":   {func(path string, _ []byte) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)) }, "not a regular file"},
}

type listedAttachment struct {
	ContainerID string
	State       string
	Damaged     []struct{ Record, Reason string }
}

func runPodlace(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	cmd := exec.Command(filepath.Join(harness.BinDir(), "podlace"), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // the exit status is in ProcessState
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func ls() (status int, list []listedAttachment, stderr string, err error) {
	status, stdout, stderr := runPodlace("ls", "-o", "json")
	return status, list, stderr, json.Unmarshal([]byte(stdout), &list)
}

// TestFaultUnreadable (F-05) makes a pod's records unreadable, one at a time. `podlace ls`, `limits` and `reload` print the record's path
// with the reason. After DEL, or GC of a pod that is gone, no plugin has a record of it and `podlace ls` does not show it.
func TestFaultUnreadable(t *testing.T) {
	s := newSweep(t, "nftables")
	hash := attachment.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}.Hash()
	stride := harness.Some(23, 1)
	n := kerneltest.Random(t).IntN(stride)
	for _, plugin := range []string{"bridge", "portmap", "bandwidth"} {
		path := "/run/podlace/chain/" + plugin + "-" + hash
		for what, d := range harness.InOrder(unreadable) {
			for _, then := range []string{thenDel, thenEmptied, thenCollect} {
				if n++; n%stride != 0 {
					continue
				}
				s.tryCase(t, fmt.Sprintf("record of %s %s, then %s", plugin, what, then), func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
					if _, err := s.Do("ADD", rt, nil); err != nil {
						return err
					}
					data, err := os.ReadFile(path)
					if err != nil {
						return err
					}
					return errors.Join(d.of(path, data), checkUnreadableNamed(path, d.reason), s.followUp(killCase{then: then, at: 2}, pod, rt),
						s.checkGCNames(then, path, d.reason), checkNothingLeft(hash))
				})
			}
		}
	}
	s.Report(t)
}

func checkUnreadableNamed(path, reason string) error {
	status, list, stderr, err := ls()
	if status != 2 || !strings.Contains(stderr, path) || !strings.Contains(stderr, reason) {
		err = errors.Join(err, fmt.Errorf("ls: status %d, %q", status, stderr))
	}
	if i := slices.IndexFunc(list, func(l listedAttachment) bool { return len(l.Damaged) > 0 }); i < 0 || list[i].ContainerID != victimID ||
		list[i].Damaged[0].Record != path || !strings.Contains(list[i].Damaged[0].Reason, reason) {
		err = errors.Join(err, fmt.Errorf("ls -o json: %+v", list))
	}
	for _, command := range []string{"reload", "limits"} {
		if status, _, stderr := runPodlace(command); status != 2 || !strings.Contains(stderr, path) || !strings.Contains(stderr, reason) {
			err = errors.Join(err, fmt.Errorf("%s: status %d, %q", command, status, stderr))
		}
	}
	return err
}

func (s *killSweep) checkGCNames(then, path, reason string) error {
	if reason == unreadable["of another pod"].reason && strings.Contains(path, "/bandwidth-") {
		return nil // GC of bridge finds the record through the link, and removes both
	}
	if log := s.collected; then == thenCollect && (!strings.Contains(log, "level=WARN") || !strings.Contains(log, path) ||
		!strings.Contains(log, reason)) {
		return fmt.Errorf("GC does not name %s: %s", path, log)
	}
	return nil
}

func checkNothingLeft(hash string) error {
	left, err := filepath.Glob("/run/podlace/chain/*" + hash + "*")
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("records %q are left", left))
	}
	status, list, stderr, lsErr := ls()
	for _, l := range list {
		if l.ContainerID != "stays" {
			lsErr = errors.Join(lsErr, fmt.Errorf("ls shows %+v", l))
		}
	}
	if status != 0 {
		lsErr = errors.Join(lsErr, fmt.Errorf("ls: status %d, %q", status, stderr))
	}
	return errors.Join(err, lsErr)
}

// TestFaultNewer: GC keeps records of a newer format while the runtime lists their pod, so a downgrade with a later upgrade loses no state.
func TestFaultNewer(t *testing.T) {
	s := newSweep(t, "nftables")
	pod := harness.NewPod(t, victimID)
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	s.Must(t, "ADD", rt)
	former := map[string][]byte{}
	for _, plugin := range []string{"bridge", "portmap", "bandwidth"} {
		path := "/run/podlace/chain/" + plugin + "-" + attachment.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}.Hash()
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		former[path] = data
		if err := unreadable["of a newer one"].of(path, data); err != nil {
			t.Fatal(err)
		}
	}
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	before := harness.Watch(t, pod)
	if err := s.collectOthers(victimID); err != nil {
		t.Fatal(err)
	}
	s.Must(t, "STATUS", nil)
	s.Must(t, "CHECK", rt)
	before.Clean(t, "GC, STATUS and CHECK with records of a newer version")
	for path, data := range former {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.Must(t, "CHECK", rt)
	s.Must(t, "DEL", rt)
}
