// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"fmt"
	"os/exec"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Alone is a pod with a veth pair but no main plugin, for calls of bandwidth without a chain. DEL of bandwidth never deletes the pair.
type Alone struct {
	Pod          *sandbox.Pod
	ifname, link string // interfaces of the pod side and the host side
	InPod, Node  string // their addresses
}

// Rates are limits in Mbit/s. Ingress is traffic that the pod receives. 0 means no limit.
type Rates struct{ Ingress, Egress int }

// NewAlone connects a new pod to the node by a veth pair.
func NewAlone(t *testing.T) *Alone {
	t.Helper()
	Need(t, "bandwidth")
	Program(t, "ip")
	a := &Alone{Pod: NewPod(t, Plain(t)), ifname: "eth0", link: "alone0", Node: "10.75.0.1", InPod: "10.75.0.2"}
	a.connect(t)
	return a
}

// Second returns another veth pair between the same pod and the node.
func (a *Alone) Second(t *testing.T) *Alone {
	t.Helper()
	b := &Alone{Pod: a.Pod, ifname: "net1", link: "alone1", Node: "10.75.1.1", InPod: "10.75.1.2"}
	b.connect(t)
	return b
}

func (a *Alone) connect(t *testing.T) {
	t.Helper()
	Shell(t, fmt.Sprintf(`
		ip link add %[1]s type veth peer name %[2]s netns %[3]s
		ip addr add %[4]s/30 dev %[1]s; ip -n %[3]s addr add %[5]s/30 dev %[2]s
		ip link set %[1]s up; ip -n %[3]s link set %[2]s up`, a.link, a.ifname, a.Pod.Name, a.Node, a.InPod))
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", a.link).Run() })
}

// Call returns a call of bandwidth, with the limits as containerd passes them.
func (a *Alone) Call(verb string, r Rates) Call {
	limits := map[string]any{}
	for direction, rate := range map[string]int{"ingress": r.Ingress, "egress": r.Egress} {
		if rate > 0 {
			limits[direction+"Rate"], limits[direction+"Burst"] = rate*1_000_000, 1<<32-1
		}
	}
	conf := Object{
		"cniVersion": "1.1.0", "name": "alone", "type": "bandwidth", "capabilities": Object{"bandwidth": true},
		"runtimeConfig": Object{"bandwidth": limits},
		"prevResult": Object{
			"cniVersion": "1.1.0", "interfaces": []any{Object{"name": a.link}, Object{"name": a.ifname, "sandbox": a.Pod.Path}},
			"ips": []any{Object{"address": a.InPod + "/30", "interface": 1}},
		},
	}
	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []any{}
		delete(conf, "prevResult")
	}
	return NewCall(verb, "bandwidth", a.Pod, a.Pod.Name, conf).With("CNI_IFNAME", a.ifname)
}

// Do runs the call, and returns an error if the plugin fails.
func (c Call) Do() error {
	o, err := c.Start()
	if err == nil && o.Exit != 0 {
		err = fmt.Errorf("%s: exit %d: %s", o.title(), o.Exit, o.Stdout)
	}
	return err
}

// InEffect returns the limits that the kernel applies to the link.
func (a *Alone) InEffect() (Rates, error) {
	r, _, err := LimitsOf(a.link)
	return r, err
}

// LimitsOf returns the limits of a link and the name of its ifb device. The pod's ingress limit is the rate of the link's token bucket, its
// egress limit that of the ifb device to which the link's ingress is redirected.
func LimitsOf(name string) (r Rates, device string, err error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return r, "", err
	}
	if r.Ingress, err = bucketRate(link); err != nil {
		return r, "", err
	}
	filters, err := netlink.FilterList(link, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return r, "", err
	}
	for _, f := range filters {
		u32, ok := f.(*netlink.U32)
		if !ok || len(u32.Actions) == 0 {
			continue
		}
		if m, ok := u32.Actions[0].(*netlink.MirredAction); ok && m.MirredAction == netlink.TCA_EGRESS_REDIR {
			to, err := netlink.LinkByIndex(m.Ifindex)
			if err != nil {
				return r, "", fmt.Errorf("the device of a redirect: %w", err)
			}
			device = to.Attrs().Name
			if r.Egress, err = bucketRate(to); err != nil {
				return r, device, err
			}
		}
	}
	return r, device, nil
}

// bucketRate returns the rate of a link's token bucket in Mbit/s, or 0 without one.
func bucketRate(link netlink.Link) (int, error) {
	qdiscs, err := netlink.QdiscList(link)
	for _, q := range qdiscs {
		if tbf, ok := q.(*netlink.Tbf); ok && q.Attrs().Parent == netlink.HANDLE_ROOT {
			return int(tbf.Rate / 125_000), err
		}
	}
	return 0, err
}

// Passes returns an error unless a ping from each side of the veth pair gets a reply.
func (a *Alone) Passes() error {
	errs := []error{Ping(nil, a.InPod, TrafficLimit), Ping(a.Pod, a.Node, TrafficLimit)}
	for i, from := range []string{"node", "pod"} {
		if errs[i] != nil {
			errs[i] = fmt.Errorf("no traffic from the %s: %w", from, errs[i])
		}
	}
	return errors.Join(errs...)
}

// Warm runs ADD and DEL of bandwidth, which creates the state that all pods share, and fills the neighbour tables. The link then has no
// limit.
func (a *Alone) Warm(t testing.TB) {
	t.Helper()
	qdiscs := func() int {
		link, err := netlink.LinkByName(a.link)
		if err != nil {
			t.Fatal(err)
		}
		list, err := netlink.QdiscList(link)
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := qdiscs()
	for _, step := range []func() error{a.Passes, a.Call("ADD", Rates{20, 40}).Do, a.Passes, a.Call("DEL", Rates{20, 40}).Do} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if now := qdiscs(); now != before {
		t.Fatalf("DEL left %d qdiscs on the link", now-before)
	}
}

// Wants fails the test unless the kernel applies the wanted limits and traffic passes.
func (a *Alone) Wants(t testing.TB, want Rates, after string) {
	t.Helper()
	if got, err := a.InEffect(); got != want || err != nil {
		t.Errorf("%s: limits %+v, %v; want %+v", after, got, err, want)
	}
	if err := a.Passes(); err != nil {
		t.Errorf("%s: %v", after, err)
	}
}

// Must runs a verb of bandwidth, which must succeed.
func (a *Alone) Must(t testing.TB, verb string, r Rates) {
	t.Helper()
	if err := a.Call(verb, r).Do(); err != nil {
		t.Fatal(err)
	}
}
