// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestNoConnectionManager checks that a container gets the RDMA connection manager's file only if the node has it.
func TestNoConnectionManager(t *testing.T) {
	p := poolOfKinds()
	p.Devices[4].RDMAFiles = []string{"infiniband/uverbs4"}
	got, err := newOffer(p, &pci.Snapshot{}, deviceGrant{cdi: pool.CDIOff}, nil, nil).allocate([]string{"0000:10:00.4"})
	if err != nil {
		t.Fatal(err)
	}
	if text := got.String(); strings.Contains(text, "rdma_cm") || !strings.Contains(text, "/dev/infiniband/uverbs4") {
		t.Error(text)
	}
}

// TestNoVhostNet checks that a device with vhost-net is unhealthy, with the reason, until the node has the files of both vhost-net and
// TUN. Either counts as present if it is in /dev or its module is loaded.
func TestNoVhostNet(t *testing.T) {
	sysfs := twoPFs(t)
	l := prepareLab(t, sysfs, `{"resourceList": [{"resourceName": "one", "selectors": [{"pfNames": ["ens0f0#0"], "needVhostNet": true}, {"pfNames": ["ens0f0"]}]}]}`)
	l.Dev = t.TempDir()
	for _, dir := range []string{filepath.Join(l.Dev, "net"), filepath.Join(sysfs, "class/misc")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/one", vf00+"!", vf01)
	l.awaitFault(vf00, "needVhostNet: the node has no /dev/vhost-net")
	write(t, filepath.Join(l.Dev, "vhost-net"), "")
	l.hup()
	l.awaitFault(vf00, "needVhostNet: the node has no /dev/net/tun")
	write(t, filepath.Join(sysfs, "class/misc/tun"), "")
	l.hup()
	l.awaitDevices("example.com/one", vf00, vf01)
}

func (l *testLab) awaitFault(id, want string) {
	l.Helper()
	got := ""
	for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		answer, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{})
		if got = answer.Faults[id]; err == nil && strings.Contains(got, want) {
			return
		}
	}
	l.Fatalf("%s: %q, want %q", id, got, want)
}
