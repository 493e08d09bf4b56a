// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/ports"
)

// exampleTopology returns a node with two bridges, two PFs, and pods with different properties. The bridges are invented: the test machine
// does not have them.
func exampleTopology() topology {
	address := func(text string) pci.Address {
		a, err := pci.ParseAddress(text)
		if err != nil {
			panic(err)
		}
		return a
	}
	pf0, pf1 := address("0000:11:00.0"), address("0000:15:00.0")
	vf := func(a string, pf pci.Address, index int) pci.Device {
		return pci.Device{Address: address(a), PF: pf, VFIndex: index, NUMANode: pci.Unknown, Driver: "iavf"}
	}
	devices := []sriovDevice{
		{Device: pci.Device{Address: pf1, NUMANode: pci.Unknown, Driver: "ice", TotalVFs: 8}, PFName: "ens1f0"},
		{Device: pci.Device{Address: pf0, NUMANode: 1, Driver: "ice", TotalVFs: 8}, PFName: "ens0f0"},
		{Device: vf("0000:11:02.0", pf0, 0), Resource: "example.com/fast"},
		{Device: vf("0000:11:02.1", pf0, 1), Resource: "example.com/fast", Holder: &allocation.Device{Namespace: "shop", Pod: "dpdk"}},
		{Device: vf("0000:15:02.0", pf1, 0), Fault: "the link of ens1f0 is down"},
	}
	list := []topologyPod{
		{Network: "podlace", Pod: "shop/web-0", ContainerID: "c1", IfName: "eth0", State: reconcile.Alive, Bridge: "br-none1",
			HostInterface: "veth1", Addresses: []netip.Addr{netip.MustParseAddr("10.58.0.3")}, IngressRate: 20e6,
			HostPorts: []ports.Port{{Port: 80, Protocol: "tcp"}}, VFs: []string{"0000:11:02.0"}},
		{Network: "podlace", ContainerID: "0123456789abcdef", IfName: "eth0", State: reconcile.Gone, Bridge: "br-none1", HostInterface: "veth2"},
		{Network: "blue", Pod: "shop/<b>&\"x\x1b[2J", ContainerID: "c3", IfName: "eth0", State: reconcile.Alive, Bridge: "br-none0",
			HostInterface: "veth3"},
		{Network: "plain", Pod: "shop/ptp", ContainerID: "c4", IfName: "eth0", State: reconcile.Unknown},
	}
	return newPicture("edge-3", list, devices, func(h allocation.Device) string { return h.Namespace + "/" + h.Pod })
}

// TestTopologyText checks the printed tree: the order of bridges, PFs and pods, and the alignment of columns. TestTopologyText also checks
// that a pod's name cannot control the terminal.
func TestTopologyText(t *testing.T) {
	want := strings.ReplaceAll(`node edge-3
|- bridge br-none0: missing
|  '- veth3  shop/<b>&"x?[2J  eth0  network blue
|- bridge br-none1: missing
|  |- veth1  shop/web-0               eth0  10.58.0.3  network podlace  hostPorts 80/tcp  ingress 20Mbit/s  VFs 0000:11:02.0
|  '- veth2  container 0123456789abc  eth0             network podlace                                                        namespace gone
|- NUMA node 1
|  '- PF ens0f0 0000:11:00.0: ice, 2 of 8 VFs
|     |- VF 0 0000:11:02.0  shop/web-0  driver iavf  resource example.com/fast  network podlace
|     '- VF 1 0000:11:02.1  shop/dpdk   driver iavf  resource example.com/fast
|- NUMA node unknown
|  '- PF ens1f0 0000:15:00.0: ice, 1 of 8 VFs
|     '- VF 0 0000:15:02.0  -  driver iavf  the link of ens1f0 is down
'- without a bridge
   '- -  shop/ptp  eth0  network plain
`, "'", "`")
	if diff := cmp.Diff(want, exampleTopology().text()); diff != "" {
		t.Error(diff)
	}
	if got := newPicture("n", nil, nil, nil).text(); got != "node n\n`- no pod is recorded, and no card has VFs\n" {
		t.Errorf("empty node: %q", got)
	}
}

// drawnTexts contains the texts, boxes and other elements of an SVG.
type drawnTexts struct {
	Width  int     `xml:"width,attr"`
	Height int     `xml:"height,attr"`
	Style  string  `xml:"style"`
	Rects  []shape `xml:"rect"`
	Texts  []shape `xml:"text"`
}

type shape struct {
	X     int    `xml:"x,attr"`
	Y     int    `xml:"y,attr"`
	Width int    `xml:"width,attr"`
	Fill  string `xml:"fill,attr"`
	Title string `xml:"title"`
	Text  string `xml:",chardata"`
}

func readSVG(t *testing.T, svg []byte) (d drawnTexts) {
	t.Helper()
	if err := xml.Unmarshal(svg, &d); err != nil {
		t.Fatalf("%v\n%s", err, svg)
	}
	return d
}

func (d drawnTexts) text(text string) (shape, bool) {
	i := slices.IndexFunc(d.Texts, func(s shape) bool { return s.Text == text })
	if i < 0 {
		return shape{}, false
	}
	return d.Texts[i], true
}

// TestTopologySVG checks that the SVG is well-formed, and that equal nodes give equal SVGs. The SVG contains all texts of the tree, escapes
// names, highlights problems, and uses only colours that the dark scheme replaces.
func TestTopologySVG(t *testing.T) {
	svg := exampleTopology().svg()
	if !bytes.Equal(svg, exampleTopology().svg()) {
		t.Error("two SVGs of one node differ")
	}
	d := readSVG(t, svg)
	for _, text := range []string{"node edge-3", "bridge br-none1: missing", "veth1", "shop/web-0", "10.58.0.3",
		"hostPorts 80/tcp", "ingress 20Mbit/s", "NUMA node 1", "PF ens0f0 0000:11:00.0: ice, 2 of 8 VFs",
		"VF 1 0000:11:02.1", "shop/dpdk", `shop/<b>&"x?[2J`, "the link of ens1f0 is down", "without a bridge", "shop/ptp"} {
		if _, ok := d.text(text); !ok {
			t.Errorf("the SVG lacks %q", text)
		}
	}
	if n := len(slices.DeleteFunc(slices.Clone(d.Rects), func(s shape) bool { return s.Fill != svgFaulty })); n != 2 {
		t.Errorf("%d boxes are marked, want 2", n)
	}
	if !strings.Contains(d.Style, "prefers-color-scheme: dark") {
		t.Error("there is no dark scheme")
	}
	for _, r := range d.Rects {
		if !strings.Contains(d.Style, `[fill="`+r.Fill+`"]`) {
			t.Errorf("colour %s has no counterpart in the dark scheme", r.Fill)
		}
	}
}

// TestTopologyLarge checks the SVG of a node with 110 pods. The SVG shows every pod's name inside the SVG's frame, and no two texts
// overlap. Long texts are cut off, and their tooltips are complete.
func TestTopologyLarge(t *testing.T) {
	var list []topologyPod
	for i := range 110 {
		a := &reconcile.Attachment{Network: "podlace", Pod: fmt.Sprintf("team-%d/web-5d9c7b8f4-%05d", i%7, i), IfName: "eth0",
			State: reconcile.Alive, ContainerID: strconv.Itoa(i), Bridge: "br-none", HostInterface: fmt.Sprintf("veth%012x", i),
			IngressRate: 10e6, Addresses: []netip.Addr{
				netip.AddrFrom4([4]byte{10, 58, 0, byte(i + 2)}), netip.MustParseAddr("fd00:58:1111:2222:3333:4444:5555:6666")}}
		for port := range i % 20 {
			a.HostPorts = append(a.HostPorts, ports.Port{Port: uint16(20000 + port), Protocol: "tcp"})
		}
		list = append(list, a)
	}
	d := readSVG(t, newPicture("edge-3", list, nil, nil).svg())
	last := map[int]int{} // right end of the latest text by height
	for _, s := range d.Texts {
		end := s.X + svgTextWidth(s.Text)
		if s.X < last[s.Y] {
			t.Errorf("%q overlaps the text before it", s.Text)
		}
		if last[s.Y] = end; end > d.Width || s.Y > d.Height {
			t.Errorf("%q is at %d,%d, outside of %dx%d", s.Text, s.X, s.Y, d.Width, d.Height)
		}
	}
	if len(last) != 112 {
		t.Errorf("%d lines, want 110 pods, a bridge and a node", len(last))
	}
	for _, a := range list {
		if _, ok := d.text(a.Pod); !ok {
			t.Errorf("the SVG lacks %s", a.Pod)
		}
	}
	if d.Width > 1600 {
		t.Errorf("%d pixels wide, want at most 1600", d.Width)
	}
	long := slices.IndexFunc(d.Texts, func(s shape) bool { return s.Title != "" })
	if long < 0 || len(d.Texts[long].Text) != svgMostRunes || !strings.HasSuffix(d.Texts[long].Text, "...") ||
		!strings.HasPrefix(d.Texts[long].Title, "hostPorts 20000/tcp 20001/tcp") || strings.HasSuffix(d.Texts[long].Title, "...") {
		t.Errorf("no text is truncated with a tooltip: %+v", d.Texts[max(long, 0)])
	}
}

// TestTopologyCommand checks the output formats, invalid values of flags, and the VFs of a machine with sysfs and a device plugin.
func TestTopologyCommand(t *testing.T) {
	if status, _, stderr := run("topology", "-o", "table"); status != exitFailed ||
		!strings.Contains(stderr, `--output "table": want text, svg or json`) {
		t.Errorf("status %d, %q", status, stderr)
	}
	if _, help, _ := run("topology", "--help"); !strings.Contains(help, `name of this node in the configuration (default "the host name")`) {
		t.Errorf("the help depends on the machine:\n%s", help)
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the rest is root's")
	}
	flags := append([]string{"topology", "--node-name", "edge-3", "--conf-dir", t.TempDir()}, labFlags(t)...)
	status, stdout, stderr := run(flags...)
	for _, line := range []string{"node edge-3\n", "|- NUMA node 0\n", "`- PF ens1f0 0000:15:00.0: ice, 2 of 2 VFs\n",
		"|- VF 0 0000:11:02.0  shop/web-0  driver iavf  resource example.com/fast\n", "the link of ens0f0 is down\n"} {
		if status != exitOK || stderr != "" || !strings.Contains(stdout, line) {
			t.Errorf("status %d, %q lacks %q\n%s", status, stdout, line, stderr)
		}
	}
	_, stdout, _ = run(append(flags, "-o", "json")...)
	var got topology
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || len(got.Cards) != 2 || got.Cards[1].VFs[1].Index != 1 ||
		got.Cards[1].NUMANode != 1 {
		t.Errorf("%v\n%s", err, stdout)
	}
	_, stdout, _ = run(append(flags, "-o", "svg")...)
	if _, ok := readSVG(t, []byte(stdout)).text("shop/web-1?[31m"); !ok {
		t.Errorf("the SVG lacks the pod of a VF\n%s", stdout)
	}
	_, _, stderr = run(append(flags, "--socket", "/nonexistent")...)
	if !strings.Contains(stderr, "the device plugin did not say which pods have devices") {
		t.Errorf("stderr %q", stderr)
	}
}
