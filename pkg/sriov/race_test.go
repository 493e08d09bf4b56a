// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestTogether: of several pods that start at the same time and request the same VF, exactly one gets it.
func TestTogether(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	pods, outcomes := make([]testLab, 4), make([]outcome, 4)
	for i := range pods {
		pods[i] = l.otherPod()
	}
	var all sync.WaitGroup
	for i := range pods {
		all.Go(func() { outcomes[i] = pods[i].Call("ADD", "together"+string(rune('a'+i))) })
	}
	all.Wait()
	have := 0
	for i, o := range outcomes {
		if o.Exit == 0 {
			have++
			pods[i].podLink("net1")
		} else if o.Failure.Code != plugin.CodeDevice || !strings.Contains(o.Failure.Msg, "has it since") {
			t.Errorf("%s", o.Stdout)
		}
	}
	if have != 1 {
		t.Errorf("%d pods have the VF", have)
	}
	for i := range pods {
		all.Go(func() { pods[i].Call("DEL", "together"+string(rune('a'+i))) })
	}
	all.Wait()
	l.isGolden()
}

// TestHidden: a pod that hides its VF loses it at DEL.
func TestHidden(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf0)
	was, peer := l.link("ens0f0v0"), l.link("ens0f0v0peer")
	l.add("a")
	cellar := kerneltest.NewPod(t)
	netns, err := os.Open(cellar.Path)
	must(t, err)
	defer netns.Close()
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link("net1")
		must(t, err, pod.MoveLink(link, netns, "mine"))
	})
	// As the kernel does, delete the interface in its namespace and create a new one on the node.
	l.onBinding(vf0, func(net string) {
		hidden, err := kernel.Open(netns)
		if err == nil {
			defer hidden.Close()
			err = hidden.DelLink("mine")
		}
		if err == nil {
			_, err = l.host.AddVeth(kernel.Veth{Host: "eth7", Pod: "ens0f0v0peer"})
		}
		// The next read of sysfs returns the interface's former name.
		if err := errors.Join(err, os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755), os.Mkdir(filepath.Join(net, "eth7"), 0o755)); err != nil {
			t.Error(err)
		}
	})
	o := l.OK(l.Call("DEL", "a"))
	if !strings.Contains(o.Log, "rebinding its driver") {
		t.Errorf("log: %s", o.Log)
	}
	link := l.link("ens0f0v0")
	if link.MAC.String() != was.MAC.String() || link.MTU != was.MTU || strings.Join(link.AltNames, " ") != "alt-ens0f0v0 other-ens0f0v0" {
		t.Errorf("%s, it was %s", describe(link), describe(was))
	}
	again := l.link("ens0f0v0peer")
	must(t, l.host.SetMAC(again, peer.MAC), l.host.SetMTU(again, peer.MTU), l.host.SetUp(again))
}
