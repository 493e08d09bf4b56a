// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	attachments "github.com/podlace/podlace/pkg/attachment"
)

// TestFaultLostRecord (F-05): DEL leaves no state of a pod with ports and limits after each of its records was deleted or truncated.
func TestFaultLostRecord(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			s := newSweep(t, backend)
			before := harness.Watch(t, s.stays)
			for _, plugin := range []string{"bridge", "portmap", "bandwidth"} {
				for title, lose := range harness.InOrder(map[string]func(path string) error{
					"lost": os.Remove, "torn": func(path string) error { return os.Truncate(path, 20) },
					"empty": func(path string) error { return os.Truncate(path, 0) },
				}) {
					s.Points++
					pod := harness.NewPod(t, victimID)
					rt := harness.Attachment(pod, victimID, harness.Capabilities())
					s.Must(t, "ADD", rt)
					hash := attachments.Key{Network: "chain", ContainerID: victimID, IfName: "eth0"}.Hash()
					if err := lose("/run/podlace/chain/" + plugin + "-" + hash); err != nil {
						t.Fatal(err)
					}
					s.Must(t, "DEL", rt)
					if err := pod.Close(); err != nil {
						t.Fatal(err)
					}
					before.Clean(t, "the record of "+plugin+" was "+title+", and DEL")
				}
			}
			s.Report(t)
		})
	}
}
