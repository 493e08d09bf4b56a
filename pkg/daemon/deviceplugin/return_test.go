// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// TestReturnsVFs checks that the daemon restores orphaned VFs right after its start. A failure to restore a VF is logged only once.
func TestReturnsVFs(t *testing.T) {
	l := prepareLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "all"}]}`)
	var calls atomic.Int32
	again := make(chan struct{}, 9)
	l.RestoreVFs = func() error {
		calls.Add(1)
		again <- struct{}{}
		return errors.New("operation not permitted")
	}
	l.kubelet.start()
	stop := l.start()
	for range 3 {
		<-again
	}
	stop()
	if got := strings.Count(l.log.String(), "could not restore orphaned VFs"); got != 1 ||
		!strings.Contains(l.log.String(), "operation not permitted") {
		t.Errorf("logged %d times in %d calls:\n%s", got, calls.Load(), l.log.String())
	}
}

// TestUnrestored checks that a VF is unhealthy while settings of its last pod are not undone, unless they harm no other pod.
func TestUnrestored(t *testing.T) {
	a, err := pci.ParseAddress(vf00)
	kerneltest.Must(t, err, os.MkdirAll(sriov.JournalFolder, 0o700))
	write := func(h sriov.Holding) {
		h.Format, h.Address, h.Netns, h.Name, h.Former.Driver = 1, a, "/run/netns/a", "net1", "i40evf"
		h.Former.PF = &kernel.VF{}
		h.Owner = attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
		text, err := json.Marshal(h)
		kerneltest.Must(t, err, os.WriteFile(filepath.Join(sriov.JournalFolder, vf00), text, 0o600))
	}
	write(sriov.Holding{})
	defer func() { kerneltest.Must(t, os.RemoveAll(sriov.JournalFolder)) }()
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01) // a pod has it
	write(sriov.Holding{Ended: true, Unrestored: "link set ens0f0 vf 0 vlan 0 qos 0 proto 802.1q: invalid argument"})
	l.hup()
	l.awaitDevices("example.com/one", vf00+"!", vf01)
	l.awaitLog("devices are unhealthy", vf00, "it is not restored after its last pod: link set ens0f0 vf 0 vlan 0 qos 0 proto 802.1q: invalid argument")
	write(sriov.Holding{Ended: true, LimitsPending: true}) // its rate or link state
	l.hup()
	l.awaitDevices("example.com/one", vf00, vf01)
	write(sriov.Holding{Ended: true})
	l.hup()
	l.awaitDevices("example.com/one", vf00+"!", vf01)
	l.awaitLog("devices are unhealthy", vf00, "it is not restored after its last pod: its journal does not say why")
}
