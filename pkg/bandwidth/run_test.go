// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

type (
	object  = kerneltest.Object
	outcome = kerneltest.Outcome
)

// lab is a node with one pod. No main plugin runs, so the test connects them with a veth pair.
type lab struct {
	kerneltest.Lab
	host     *kernel.Node
	hostSide kernel.Link
}

func limits(ingress, egress int) object {
	return object{"bandwidth": object{"ingressRate": ingress, "egressRate": egress}}
}

// newLab returns a lab that checks for leaks when the test ends.
func newLab(t *testing.T) lab {
	t.Helper()
	l := connected(t)
	kerneltest.Clean(t, l.Pod)
	return l
}

func connected(t *testing.T) lab {
	t.Helper()
	return connectedAs(t, "bwt0")
}

func connectedAs(t *testing.T, name string) lab {
	t.Helper()
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	l := lab{Lab: kerneltest.Lab{T: t, Plugin: Plugin().Run, Pod: kerneltest.NewPod(t)}, host: host}
	netns, err := os.Open(l.Pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: "eth0", MTU: 1400, Netns: netns}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.DelLink(name); err != nil {
			t.Error(err)
		}
	})
	l.hostSide = l.link(name)
	l.must(host.SetUp(l.hostSide))
	l.Conf = object{"cniVersion": "1.1.0", "name": "net", "type": "bandwidth", "prevResult": object{"cniVersion": "1.1.0", "interfaces": []any{
		object{"name": name}, object{"name": "eth0", "sandbox": l.Pod.Path}}}, "runtimeConfig": limits(20e6, 10e6)}
	return l
}

func (l lab) must(errs ...error) {
	l.Helper()
	if err := errors.Join(errs...); err != nil {
		l.Fatal(err)
	}
}

func (l lab) link(name string) kernel.Link {
	l.Helper()
	link, ok, err := l.host.Link(name)
	if err != nil || !ok {
		l.Fatalf("link %s: %t, %v", name, ok, err)
	}
	return link
}

func (l lab) ifb(id string) string {
	return ifbName(attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"})
}

// applied returns the rates that the kernel applies, as "ingress/egress" in bits per second.
func (l lab) applied(id string) string {
	l.Helper()
	rate := func(name string) (rate uint64) {
		link, ok, err := l.host.Link(name)
		if !ok || err != nil {
			return 0
		}
		s, _, err := l.host.Shaped(link)
		l.must(err)
		return s.Rate
	}
	ifb, ok, err := l.host.Link(l.ifb(id))
	l.must(err)
	if ok {
		redirected, err := l.host.Redirected(l.hostSide, ifb)
		l.must(err)
		ok = redirected == kernel.RedirectsAll
	}
	return fmt.Sprintf("%d/%d redirected %t", rate("bwt0"), rate(l.ifb(id)), ok)
}
