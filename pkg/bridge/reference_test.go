// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestDelLeavesAnothers (C-45..C-54): DEL of an attachment without a record takes no link of one that is there, though prevResult names its
// interface and its MAC: with the namespace and without, of an attachment that is gone, of an ID that never was, of another network.
func TestDelLeavesAnothers(t *testing.T) {
	l := newLab(t, "capabilities", object{"ips": true}, "runtimeConfig", object{"ips": []string{"10.60.0.50"}})
	old := l.add("old")
	l.ok(l.call("DEL", "old", "prevResult", old.prev))
	a := l.add("new")
	if a.result.Interfaces[2].Mac != old.result.Interfaces[2].Mac {
		t.Fatalf("the MAC does not follow from the address: %s, %s", old.prev, a.prev)
	}
	for _, netns := range []string{l.pod.Path, ""} {
		for what, prev := range map[string]any{"the old": old.prev, "the new": a.prev} {
			for _, id := range []string{"old", "unknown"} {
				l.ok(l.call("DEL", id, "CNI_NETNS", netns, "prevResult", prev))
				if o := a.check(); o.exit != 0 {
					t.Fatalf("after DEL %s in %q with the result of %s: %s", id, netns, what, o.stdout)
				}
			}
		}
		l.ok(l.call("DEL", "new", "CNI_NETNS", netns, "name", "net2", "prevResult", a.prev))
		l.ok(a.check())
	}
	a.loseRecord()
	l.ok(l.call("DEL", "unknown", "prevResult", a.prev))
	if _, err := ifIndex(l, "eth0"); err != nil {
		t.Errorf("without a record: %v", err)
	}
}

func ifIndex(l lab, name string) (index int, err error) {
	err = l.inPod(name, func(link netlink.Link) error { index = link.Attrs().Index; return nil })
	return index, err
}

// TestShortPoolSparesRenewed (F-44): a pod whose record names a namespace that is gone, and that the reference attached anew in another, has
// a lease that is younger than the record: a short pool takes it from nobody. DEL ends it.
func TestShortPoolSparesRenewed(t *testing.T) {
	l := newLab(t, "name", "renewed", "bridge", "btr0", "ipam", object{"type": "host-local", "subnet": "10.63.0.0/30"})
	l.ok(l.call("ADD", "pod"))
	lease := "/var/lib/cni/networks/renewed/10.63.0.2"
	if err := os.Remove(lease); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond) // the time of a file is that of the kernel's last tick
	if err := os.WriteFile(lease, []byte("pod\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.pod.Close(); err != nil {
		t.Fatal(err)
	}
	other := l.other()
	for range 2 {
		l.fails(other.call("ADD", "next"), plugin.CodeExhausted, "no IP addresses available")
	}
	l.ok(l.call("DEL", "pod"))
	other.add("next")
}
