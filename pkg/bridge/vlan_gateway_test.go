// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"sync"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func vlan200() []any {
	return []any{"name", "vlans200", "vlan", 200, "ipam", hostLocal("10.79.0.0/24", "fd00:79::/64"), "isDefaultGateway", true, "ipMasq", true}
}

// TestVLANGateway: through its own gateway on the node, each VLAN's pods reach the node and pods of other VLANs.
func TestVLANGateway(t *testing.T) {
	for _, bridged := range []string{"0", "1"} {
		t.Run("bridge-nf-call-iptables="+bridged, func(t *testing.T) { testVLANGateway(t, bridged) })
	}
}

func testVLANGateway(t *testing.T, bridged string) {
	l, has := vlanLab(t, "isDefaultGateway", true, "ipMasq", true, "ipam", hostLocal("10.78.0.0/24", "fd00:78::/64"))
	if !has {
		return
	}
	l.setBridged(bridged)
	a := l.add("a")
	l.OK(l.other().Call("ADD", "first", vlan200()...))
	l.OK(l.Call("DEL", "first", vlan200()...))
	kerneltest.Clean(t)
	b := l.other().add("b")
	c := l.other()
	c.Conf = c.Conf.With(vlan200()...)
	d := c.add("d")
	if got := fmt.Sprintln(len(d.result.Interfaces), d.result.Interfaces[3].Name, *d.result.IPs[0].Interface); got != "4 btv.200 2\n" {
		t.Errorf("result: %s", got)
	}
	if err := onHost("btv.200", func(link netlink.Link) error {
		if mac := link.Attrs().HardwareAddr.String(); mac != d.result.Interfaces[3].Mac {
			t.Errorf("MAC %s, the result says %s", mac, d.result.Interfaces[3].Mac)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"btv.200", l.gatewayPort("btv.200")} {
		if got, err := l.host().Get("ipv6/conf/" + name + "/accept_ra"); got != "0" || err != nil {
			t.Errorf("accept_ra of %s: %s, %v", name, got, err)
		}
	}
	if got := l.gatewayAddresses(); got != "" {
		t.Errorf("the bridge has %s", got)
	}
	for vlan, want := range map[string]string{"btv.100": "10.78.0.1/24 fd00:78::1/64", "btv.200": "10.79.0.1/24 fd00:79::1/64"} {
		if got := (lab{kerneltest.Lab{T: t, Conf: object{"bridge": vlan}}}).gatewayAddresses(); got != want {
			t.Errorf("%s has %s, want %s", vlan, got, want)
		}
		if got := l.portVLANs(l.gatewayPort(vlan)); got != vlan[len("btv."):]+" pvid untagged" {
			t.Errorf("%s: %s", vlan, got)
		}
	}
	l.serveOn("10.78.0.1:7080", "10.79.0.1:7080", "[fd00:78::1]:7080", "[fd00:79::1]:7080")
	d.serve("tcp", ":8080")
	b.serve("tcp", ":8080")
	for _, address := range []string{"10.78.0.1:7080", "[fd00:78::1]:7080"} {
		a.mustReach(address, "node")
	}
	for _, address := range []string{"10.79.0.1:7080", "[fd00:79::1]:7080"} {
		d.mustReach(address, "node")
	}
	a.mustReach(b.ip()+":8080", "b")
	a.mustReach(d.ip()+":8080", "d") // through the router
	for _, backend := range []attached{b, d} {
		l.setService(backend.ip())
		a.mustReach(serviceIP+":80", backend.id)
	}
	if err := l.masquerades("10.78.0.0/24 fd00:78::/64", "10.78.0.0/24 fd00:78::/64"); err != nil {
		t.Error(err)
	}
	l.OK(a.check())
	l.OK(d.check())
	// this DEL keeps the gateway, because other pods use it
	l.OK(b.Call("DEL", "b"))
	l.OK(a.check())
}

// serveOn starts a TCP server on the node for each address, until the test ends.
func (l lab) serveOn(addresses ...string) {
	l.Helper()
	for _, address := range addresses {
		node, err := net.Listen("tcp", address)
		if err != nil {
			l.Fatal(err)
		}
		l.Cleanup(func() { node.Close() })
		go answerAll(node, "node")
	}
}

// setBridged sets whether iptables rules see bridged packets (bridge-nf-call-iptables and bridge-nf-call-ip6tables), until the test ends.
func (l lab) setBridged(value string) {
	l.Helper()
	h := l.host()
	for _, family := range []string{"iptables", "ip6tables"} {
		path := "bridge/bridge-nf-call-" + family
		before, err := h.Get(path)
		if err != nil {
			l.Skipf("SKIPPED: no br_netfilter here: %v", err)
		}
		l.Cleanup(func() { _ = h.Set(kernel.Sysctl{Path: path, Value: before}) })
		if err := h.Set(kernel.Sysctl{Path: path, Value: value}); err != nil {
			l.Fatal(err)
		}
	}
}

// setService creates a Service with one backend, in place of that of an earlier call.
func (l lab) setService(backend string) {
	l.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader("add table ip kube-proxy\ndelete table ip kube-proxy\n" + fmt.Sprintf(services["nftables"].rules, backend))
	if out, err := cmd.CombinedOutput(); err != nil {
		l.Fatalf("%v: %s", err, out)
	}
	l.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "ip", "kube-proxy").Run() })
}

func answerAll(listener net.Listener, text string) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		_, _ = conn.Write([]byte(text))
		conn.Close()
	}
}

// TestChangedSubnetOfVLAN: only pods of the same VLAN keep an old gateway address in use.
func TestChangedSubnetOfVLAN(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	other := l.other()
	other.Conf = other.Conf.With(vlan200()...)
	other.add("d")
	l.add("a")
	changed := hostLocal("10.80.0.0/24")
	l.Fails(l.other().Call("ADD", "b", "ipam", changed), plugin.CodeAddressTaken, "btv.100 already has the address 10.78.0.1/24")
	l.OK(l.Call("DEL", "a"))
	l.add("b", "ipam", changed)
	if got := (lab{kerneltest.Lab{T: t, Conf: object{"bridge": "btv.100"}}}).gatewayAddresses(); got != "10.80.0.1/24" {
		t.Errorf("gateways: %s", got)
	}
}

// TestGatewayOfOthers: ADD uses a gateway pair of the reference plugin, and attaches it again if the bridge was deleted and created. It
// leaves another program's link alone that has the name of a gateway.
func TestGatewayOfOthers(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	l.OK(l.Call("ADD", "first", "isGateway", false))
	l.OK(l.Call("DEL", "first"))
	if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "btv.100"}}); err != nil {
		t.Fatal(err)
	}
	o := l.Call("ADD", "a")
	l.Fails(o, plugin.CodeDevice, "btv.100 cannot be the gateway of VLAN 100: want a veth whose other end is a port of btv")
	l.delLink("btv.100")
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "vethref", MasterIndex: l.bridgeIndex(), TxQLen: -1, MTU: 1500},
		PeerName: "btv.100"}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatal(err)
	}
	a := l.add("a", "preserveDefaultVlan", true)
	if got := l.portVLANs("vethref"); got != "1 untagged, 100 pvid untagged" && got != "100 pvid untagged" {
		t.Error(got)
	}
	l.OK(a.check("preserveDefaultVlan", true))
	l.OK(a.Call("DEL", "a"))
	l.delLink("btv")
	b := l.add("b")
	if got := l.portVLANs("vethref"); got != "100 pvid untagged" {
		t.Error(got)
	}
	l.OK(b.check())
}

// TestLostVLANs: the next ADD creates a deleted bridge, and attaches all pods and their gateway in the right VLANs.
func TestLostVLANs(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	a, b := l.add("a"), l.other().add("b")
	l.delLink("btv")
	c := l.other().add("c", "vlan", 0, "isGateway", false)
	for _, pod := range []attached{a, b, c} {
		pod.serve("tcp4", ":80")
	}
	l.OK(a.check())
	l.OK(b.check())
	a.mustReach(b.ip()+":80", "b")
	a.mustReach(c.ip()+":80", "")
	node, err := net.Listen("tcp", "10.78.0.1:7080")
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	go answerAll(node, "node")
	a.mustReach("10.78.0.1:7080", "node")
}

func (l lab) delLink(name string) {
	l.Helper()
	if err := l.host().DelLink(name); err != nil {
		l.Fatal(err)
	}
}

// numberedIPAM returns a fake IPAM plugin without locks, whose addresses depend on the number in the container ID.
func numberedIPAM(t *testing.T) plugin.Plugin {
	return plugin.Plugin{Name: "numbered",
		Add: func(r *plugin.Request) (*types100.Result, error) {
			return ipamResult(t, `"ips":[{"address":"10.78.1.`+r.ContainerID[1:]+`/16"}]`), nil
		},
		Del:   func(*plugin.Request) error { return nil },
		Check: func(*plugin.Request) error { return nil },
	}
}

// TestFirstPodsOfVLAN: the first pods of a VLAN share one bridge and one gateway, even if many ADDs run at the same time.
func TestFirstPodsOfVLAN(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	l.Plugin = Plugin(numberedIPAM(t)).Run
	l.Conf = l.Conf.With("ipam", object{"type": "numbered"})
	const n = 50
	pods := make([]lab, n)
	for i := range pods {
		pods[i] = l.other()
	}
	outcomes := make([]outcome, n)
	var wg sync.WaitGroup
	for i, pod := range pods {
		wg.Go(func() { outcomes[i] = pod.Call("ADD", fmt.Sprint("p", i)) })
	}
	wg.Wait()
	for i, o := range outcomes {
		l.OK(o)
		a := attached{lab: pods[i], id: fmt.Sprint("p", i), prev: o.Stdout}
		l.OK(a.check())
	}
	if ports, err := l.host().Ports(kernel.Link{Index: l.bridgeIndex()}); err != nil || len(ports) != n+1 {
		t.Errorf("%d ports, %v, want %d", len(ports), err, n+1)
	}
	for i, pod := range pods {
		l.OK(pod.Call("DEL", fmt.Sprint("p", i)))
	}
}
