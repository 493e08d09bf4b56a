// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"flag"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var kills = flag.Int("kills", 1, "TestKills: moments at which each program is killed while a pod starts, and as many while it ends")

// About how long a pod takes to start and to end. TestKills kills programs at different times within.
const (
	startTakes = 2400 * time.Millisecond
	endTakes   = 1200 * time.Millisecond
)

// TestKills kills the daemon, the kubelet, containerd and the API server while a pod with a claim starts or ends. The pod gets its VF, none
// has two owners, and all are on the node after the last pod.
func TestKills(t *testing.T) {
	if *kills < 1 {
		t.Fatalf("-kills %d: want at least 1", *kills)
	}
	for _, program := range []string{"sriov-device-plugin", "kubelet", "containerd", "kube-apiserver"} {
		t.Run(program, func(t *testing.T) {
			l := newLab(t, setup{})
			l.template("vf", "nic")
			l.pod("beside", "nic=+vf")
			l.runs("beside")
			beside := l.allocated(l.claimOf("beside", "nic"))
			for i := range *kills {
				moment := time.Duration(2*i+1) * startTakes / time.Duration(2**kills)
				name := fmt.Sprint("web-", i)
				l.pod(name, "nic=+vf")
				l.killAfter(program, moment)
				l.runs(name)
				ids := l.allocated(l.claimOf(name, "nic"))
				l.attached(name, ids...)
				l.attached("beside", beside...)
				if slices.Contains(beside, ids[0]) {
					t.Fatalf("pod %s and pod beside have VF %s", name, ids[0])
				}
				if err := l.client.CoreV1().Pods(l.ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				l.killAfter(program, time.Duration(2*i+1)*endTakes/time.Duration(2**kills))
				l.gone(name)
				within(t, "only the VF of pod beside is away", func() error {
					if got := journals(); !slices.Equal(got, beside) {
						return fmt.Errorf("journals of %v: want %v", got, beside)
					}
					return nil
				})
			}
			l.delete("beside")
			within(t, "all VFs are home", l.allHome)
			within(t, "no claim is prepared", l.noRecords)
			t.Logf("killed %d times while a pod starts, %d times while one ends: 0 pods without their VF, 0 VFs left", *kills, *kills)
		})
	}
}

// killAfter kills a program after a delay. If no supervisor restarts the program, killAfter restarts the program.
func (l *lab) killAfter(program string, moment time.Duration) {
	l.Helper()
	time.Sleep(moment)
	switch program {
	case "sriov-device-plugin":
		l.restart(syscall.SIGKILL)
	case "kube-apiserver":
		if out, err := inPlane("sh", "-c", "kill -KILL $(cat /run/node/apiserver.pid)"); err != nil {
			l.Fatal(err, out)
		}
		l.apiReady()
	default:
		if err := syscall.Kill(servicePID(program), syscall.SIGKILL); err != nil {
			l.Fatal(err)
		}
	}
}
