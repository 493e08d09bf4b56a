// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/sandbox"
)

// alone is an interface of a pod that some main plugin has connected, and whose link stays whatever bandwidth does.
type alone struct {
	pod          *sandbox.Pod
	ifname, link string // the pod's end and the node's
	inPod, node  string // their addresses
}

// rates are limits in Mbit/s as the pod sees them; 0 is none.
type rates struct{ ingress, egress int }

func newAlone(t *testing.T) *alone {
	t.Helper()
	need(t, "bandwidth")
	program(t, "ip")
	a := &alone{pod: newPod(t, plain(t)), ifname: "eth0", link: "alone0", node: "10.75.0.1", inPod: "10.75.0.2"}
	a.connect(t)
	return a
}

// second is another interface of the same pod.
func (a *alone) second(t *testing.T) *alone {
	t.Helper()
	b := &alone{pod: a.pod, ifname: "net1", link: "alone1", node: "10.75.1.1", inPod: "10.75.1.2"}
	b.connect(t)
	return b
}

func (a *alone) connect(t *testing.T) {
	t.Helper()
	shell(t, fmt.Sprintf(`
		ip link add %[1]s type veth peer name %[2]s netns %[3]s
		ip addr add %[4]s/30 dev %[1]s; ip -n %[3]s addr add %[5]s/30 dev %[2]s
		ip link set %[1]s up; ip -n %[3]s link set %[2]s up`, a.link, a.ifname, a.pod.Name, a.node, a.inPod))
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", a.link).Run() })
}

// call is one of bandwidth, with limits as containerd sends them.
func (a *alone) call(verb string, r rates) call {
	limits := map[string]any{}
	for direction, rate := range map[string]int{"ingress": r.ingress, "egress": r.egress} {
		if rate > 0 {
			limits[direction+"Rate"], limits[direction+"Burst"] = rate*1_000_000, 1<<32-1
		}
	}
	conf := object{
		"cniVersion": "1.1.0", "name": "alone", "type": "bandwidth", "capabilities": object{"bandwidth": true},
		"runtimeConfig": object{"bandwidth": limits},
		"prevResult": object{
			"cniVersion": "1.1.0", "interfaces": []any{object{"name": a.link}, object{"name": a.ifname, "sandbox": a.pod.Path}},
			"ips": []any{object{"address": a.inPod + "/30", "interface": 1}},
		},
	}
	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []any{}
		delete(conf, "prevResult")
	}
	return newCall(verb, "bandwidth", a.pod, a.pod.Name, conf).with("CNI_IFNAME", a.ifname)
}

// do runs a call that must succeed.
func (c call) do() error {
	o, err := c.start()
	if err == nil && o.exit != 0 {
		err = fmt.Errorf("%s: exit %d: %s", o.title(), o.exit, o.stdout)
	}
	return err
}

// inEffect reads from the kernel which limits hold: the token bucket of the link, and that of the device to which all that the link receives
// is redirected.
func (a *alone) inEffect() (r rates, err error) {
	link, err := netlink.LinkByName(a.link)
	if err != nil {
		return r, err
	}
	if r.ingress, err = bucketOf(link); err != nil {
		return r, err
	}
	filters, err := netlink.FilterList(link, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return r, err
	}
	for _, f := range filters {
		u32, ok := f.(*netlink.U32)
		if !ok || len(u32.Actions) == 0 {
			continue
		}
		if m, ok := u32.Actions[0].(*netlink.MirredAction); ok && m.MirredAction == netlink.TCA_EGRESS_REDIR {
			to, err := netlink.LinkByIndex(m.Ifindex)
			if err != nil {
				return r, fmt.Errorf("the device of a redirect: %w", err)
			}
			if r.egress, err = bucketOf(to); err != nil {
				return r, err
			}
		}
	}
	return r, nil
}

// bucketOf returns the rate of the token bucket of a link in Mbit/s, 0 without one.
func bucketOf(link netlink.Link) (int, error) {
	qdiscs, err := netlink.QdiscList(link)
	for _, q := range qdiscs {
		if tbf, ok := q.(*netlink.Tbf); ok && q.Attrs().Parent == netlink.HANDLE_ROOT {
			return int(tbf.Rate / 125_000), err
		}
	}
	return 0, err
}

// passes sends an echo request from either side.
func (a *alone) passes() error {
	errs := []error{ping(nil, a.inPod, trafficLimit), ping(a.pod, a.node, trafficLimit)}
	for i, from := range []string{"node", "pod"} {
		if errs[i] != nil {
			errs[i] = fmt.Errorf("no traffic from the %s: %w", from, errs[i])
		}
	}
	return errors.Join(errs...)
}

// warm has bandwidth make what stays on the node, and the neighbours find one another. On the link nothing stays.
func (a *alone) warm(t testing.TB) {
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
	for _, step := range []func() error{a.passes, a.call("ADD", rates{20, 40}).do, a.passes, a.call("DEL", rates{20, 40}).do} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if now := qdiscs(); now != before {
		t.Fatalf("DEL left %d qdiscs on the link", now-before)
	}
}

// wants fails the test unless these limits hold, and traffic passes.
func (a *alone) wants(t testing.TB, want rates, after string) {
	t.Helper()
	if got, err := a.inEffect(); got != want || err != nil {
		t.Errorf("%s: limits %+v, %v; want %+v", after, got, err, want)
	}
	if err := a.passes(); err != nil {
		t.Errorf("%s: %v", after, err)
	}
}

// tcOf is what tc(8) shows of a link, without counters and numbers that the kernel counts up.
func tcOf(t testing.TB, netns, link string) string {
	t.Helper()
	in := ""
	if netns != "" {
		in = "-n " + netns + " "
	}
	text := shell(t, fmt.Sprintf("tc %[1]sqdisc show dev %[2]s; tc %[1]sfilter show dev %[2]s ingress", in, link))
	if strings.Contains(text, "clsact") { // of an ingress qdisc tc shows the same again
		text += shell(t, fmt.Sprintf("tc %sfilter show dev %s egress", in, link))
	}
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "index ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}

// must runs a verb that must succeed.
func (a *alone) must(t testing.TB, verb string, r rates) {
	t.Helper()
	if err := a.call(verb, r).do(); err != nil {
		t.Fatal(err)
	}
}
