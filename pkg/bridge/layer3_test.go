// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func ipamResult(t testing.TB, body string) *types100.Result {
	t.Helper()
	var r types100.Result
	if err := json.Unmarshal([]byte(`{"cniVersion":"1.1.0",`+body+`}`), &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

func routeText(r kernel.Route) string {
	text := r.Dst.String()
	if r.Gateway.IsValid() {
		text += " via " + r.Gateway.String()
	}
	for name, n := range map[string]int{"mtu": r.MTU, "advmss": r.AdvMSS, "priority": r.Priority} {
		if n != 0 {
			text += fmt.Sprintf(" %s %d", name, n)
		}
	}
	for name, n := range map[string]*int{"table": r.Table, "scope": r.Scope} {
		if n != nil {
			text += fmt.Sprintf(" %s %d", name, *n)
		}
	}
	return text
}

// text formats the planned addresses and routes like ip(8).
func (l layer3) text() string {
	var lines []string
	for _, a := range l.Addresses {
		lines = append(lines, "pod "+a.String())
	}
	for _, gw := range l.gateways {
		lines = append(lines, "bridge "+gw.String())
	}
	for _, r := range l.Routes {
		lines = append(lines, "route "+routeText(r))
	}
	return strings.Join(lines, "\n")
}

func TestPlanLayer3(t *testing.T) {
	const (
		four = `"ips":[{"address":"10.1.0.5/24"}]`
		gw4  = `"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.254"}]`
		both = `"ips":[{"address":"10.1.0.5/24"},{"address":"fd00::5/64"}]`
		def  = `,"routes":[{"dst":"0.0.0.0/0"}]`
	)
	gateway, defaultGateway := Config{Gateway: true}, Config{Gateway: true, DefaultGateway: true}
	for _, c := range []struct {
		name, from, want string
		cfg              Config
	}{
		{"nothing", `"ips":[]`, "", defaultGateway},
		{"address alone", four, "pod 10.1.0.5/24", Config{}},
		{"no gateway known", four + def, "pod 10.1.0.5/24\nroute 0.0.0.0/0", Config{}},
		{"gateway of the IPAM plugin is not ours", gw4 + def, "pod 10.1.0.5/24\nroute 0.0.0.0/0 via 10.1.0.254", Config{}},
		{"first address of the subnet", four + def, "pod 10.1.0.5/24\nbridge 10.1.0.1/24\nroute 0.0.0.0/0 via 10.1.0.1", gateway},
		{"gateway of the IPAM plugin", gw4, "pod 10.1.0.5/24\nbridge 10.1.0.254/24", gateway},
		{"default routes", both, "pod 10.1.0.5/24\npod fd00::5/64\nbridge 10.1.0.1/24\nbridge fd00::1/64\nroute 0.0.0.0/0 via 10.1.0.1\nroute ::/0 via fd00::1", defaultGateway},
		{"a default route with a gateway stays alone", both + `,"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.9"}]`,
			"pod 10.1.0.5/24\npod fd00::5/64\nbridge 10.1.0.1/24\nbridge fd00::1/64\nroute 0.0.0.0/0 via 10.1.0.9\nroute ::/0 via fd00::1",
			defaultGateway},
		{"first gateway of a family", `"ips":[{"address":"10.1.0.5/24"},{"address":"10.2.0.5/24"}]` + def,
			"pod 10.1.0.5/24\npod 10.2.0.5/24\nbridge 10.1.0.1/24\nbridge 10.2.0.1/24\nroute 0.0.0.0/0 via 10.1.0.1", gateway},
		{"keys of a route", gw4 + `,"routes":[{"dst":"192.0.2.0/24","gw":"10.1.0.7","mtu":1400,"table":100}]`,
			"pod 10.1.0.5/24\nroute 192.0.2.0/24 via 10.1.0.7 mtu 1400 table 100", Config{}},
		{"a scope means no gateway", gw4 + `,"routes":[{"dst":"192.0.2.0/24","scope":253}]`, "pod 10.1.0.5/24\nroute 192.0.2.0/24 scope 253",
			Config{}},
		{"gateway of 16 bytes", `"ips":[{"address":"10.1.0.5/24","gateway":"::ffff:10.1.0.1"}]`, "pod 10.1.0.5/24\nbridge 10.1.0.1/24", gateway},
		{"single address", `"ips":[{"address":"10.1.0.5/32","gateway":"169.254.1.1"}]` + def,
			"pod 10.1.0.5/32\nbridge 169.254.1.1/32\nroute 0.0.0.0/0 via 169.254.1.1", gateway},
	} {
		l, err := planLayer3(c.cfg, ipamResult(t, c.from))
		if diff := cmp.Diff(c.want, l.text()); diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", c.name, err, diff)
		}
	}
}

func TestPlanLayer3Refused(t *testing.T) {
	for from, says := range map[string]string{
		`"ips":[{}]`: "invalid address",
		`"ips":[{"address":"fd00::5/64","gateway":"10.1.0.1"}]`:                            "gateway 10.1.0.1 of address fd00::5/64: want an address of the same family",
		`"ips":[{"address":"10.1.0.5/24"}],"routes":[{"dst":"fd00::/64","gw":"10.1.0.1"}]`: "gateway 10.1.0.1 is of the other family",
		`"ips":[{"address":"10.1.0.5/24"}],"routes":[{}]`:                                  "want a destination with prefix length",
	} {
		if l, err := planLayer3(Config{}, ipamResult(t, from)); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v", from, l, err)
		}
	}
}

// TestGatewayOfTheBridge: with isGateway, a gateway address that no host can have is an error; without, any is accepted.
func TestGatewayOfTheBridge(t *testing.T) {
	for gw, says := range map[string]string{
		"127.0.0.1": "a loopback address", "224.0.0.5": "a multicast address", "255.255.255.255": "a broadcast address",
		"10.1.0.255": "a broadcast address", "0.0.0.0": "the unspecified address",
	} {
		from := ipamResult(t, `"ips":[{"address":"10.1.0.5/24","gateway":"`+gw+`"}]`)
		if _, err := planLayer3(Config{Gateway: true}, from); plugin.Code(err) != plugin.CodeConfig ||
			!strings.Contains(err.Error(), "isGateway: gateway "+gw+" of address 10.1.0.5/24: "+says) {
			t.Errorf("%s: %v", gw, err)
		}
		if _, err := planLayer3(Config{}, from); err != nil {
			t.Errorf("without isGateway: %v", err)
		}
	}
	for _, good := range []string{"10.1.0.5/31,10.1.0.4", "10.1.0.5/24,10.2.0.255", "10.1.0.5/24,10.1.0.0",
		"fd00::5/64,fd00::ffff:ffff:ffff:ffff"} {
		address, gw, _ := strings.Cut(good, ",")
		if _, err := planLayer3(Config{Gateway: true}, ipamResult(t, `"ips":[{"address":"`+address+`","gateway":"`+gw+`"}]`)); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// TestResult: earlier plugins' entries precede Podlace's, and the interface indexes are correct.
func TestResult(t *testing.T) {
	from := ipamResult(t, `"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{"nameservers":["192.0.2.1"]}`)
	l, err := planLayer3(Config{}, from)
	if err != nil {
		t.Fatal(err)
	}
	j := &job{r: &plugin.Request{NetnsPath: "/run/netns/x", IfName: "eth0"}}
	w := wiring{bridge: kernel.Link{Name: "br", MTU: 1500}, host: kernel.Link{Name: "veth", MTU: 1400},
		pod: kernel.Link{Name: "eth0", MTU: 1400}}
	got := j.attachmentResult(w, l, from)
	var names []string
	for _, i := range got.Interfaces {
		names = append(names, fmt.Sprint(i.Name, " ", i.Sandbox, " ", i.Mtu))
	}
	if diff := cmp.Diff([]string{"br  1500", "veth  1400", "eth0 /run/netns/x 1400"}, names); diff != "" {
		t.Error(diff)
	}
	if len(got.IPs) != 1 || *got.IPs[0].Interface != 2 || len(got.Routes) != 1 || got.DNS.Nameservers[0] != "192.0.2.1" {
		t.Errorf("got %+v", got)
	}
	j.r.Prev = ipamResult(t, `"interfaces":[{"name":"a"},{"name":"b"}],"ips":[{"address":"10.9.0.5/24","interface":1}],"routes":[{"dst":"192.0.2.0/24"}]`)
	j.cfg.DNS = &from.DNS
	got = j.attachmentResult(w, l, ipamResult(t, `"ips":[]`))
	if len(got.Interfaces) != 5 || *got.IPs[0].Interface != 1 || *got.IPs[1].Interface != 4 || got.Interfaces[4].Name != "eth0" ||
		len(got.Routes) != 2 ||
		got.DNS.Nameservers[0] != "192.0.2.1" {
		t.Errorf("after another plugin: %+v", got)
	}
}

func TestNFTMasquerade(t *testing.T) {
	l, err := planLayer3(Config{}, ipamResult(t, `"ips":[{"address":"10.1.0.5/24"},{"address":"fd00::5/64"}]`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		cfg    Masquerade
		shared bool
		want   string
	}{
		{Masquerade{V4: true, V6: true}, true, "[10.1.0.0/24 fd00::/64] [10.1.0.0/24 fd00::/64]"},
		{Masquerade{V4: true, V6: true}, false, "[10.1.0.5/32 fd00::5/128] [10.1.0.0/24 fd00::/64]"},
		{Masquerade{V4: true}, true, "[10.1.0.0/24] [10.1.0.0/24]"},
		{Masquerade{V6: true, Except: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}}, false,
			"[fd00::5/128] [2001:db8::/32 fd00::/64]"},
	} {
		m := nftMasquerade("net", c.cfg, l.Addresses, c.shared)
		if got := fmt.Sprint(m.Sources, " ", m.Local); got != c.want || m.Network != "net" {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// TestMasqueradeChain: the chain has the reference plugin's name.
func TestMasqueradeChain(t *testing.T) {
	for ifname, want := range map[string]string{"eth0": "CNI-46d35c6a9e0ed75882799dbb", "net1": "CNI-d954c4bcd4c878d7cbde9680"} {
		if got := masqueradeChain(attachment.Key{Network: "podlace", ContainerID: "0123456789abcdef", IfName: ifname}); got != want {
			t.Errorf("%s: %s, want %s", ifname, got, want)
		}
	}
}

func TestIPAMType(t *testing.T) {
	for raw, want := range map[string]string{``: "", `null`: "", `{}`: "", `[]`: "", `{"type":7}`: "", `{"type":"x"}`: "x",
		`{"TYPE":"y"}`: "y"} {
		if got := ipam.Type(json.RawMessage(raw)); got != want {
			t.Errorf("%s: %q, want %q", raw, got, want)
		}
	}
}

// FuzzPlanLayer3: any IPAM result yields a complete plan or an error.
func FuzzPlanLayer3(f *testing.F) {
	for _, seed := range []string{`{"ips":[{"address":"10.1.0.5/24"}],"routes":[{"dst":"0.0.0.0/0"}]}`,
		`{"ips":[{"address":"255.255.255.255/32"}]}`,
		`{"ips":[{"address":"ffff::/128","gateway":"1.2.3.4"}]}`, `{"routes":[{"dst":"::/0","gw":"::1","scope":0}]}`, `{}`} {
		f.Add([]byte(seed), true, true)
		f.Add([]byte(seed), false, false)
	}
	f.Fuzz(func(t *testing.T, answer []byte, gateway, defaultGateway bool) {
		var from types100.Result
		if json.Unmarshal(answer, &from) != nil || slices.Contains(from.IPs, nil) || slices.Contains(from.Routes, nil) {
			return
		}
		l, err := planLayer3(Config{Gateway: gateway, DefaultGateway: defaultGateway}, &from)
		if err != nil {
			return
		}
		if len(l.Addresses) != len(from.IPs) || len(l.IPs) != len(from.IPs) || len(l.Routes) != len(l.Shown) ||
			gateway && len(l.gateways) != len(from.IPs) {
			t.Errorf("%s: %+v", answer, l)
		}
		for _, p := range append(l.Addresses, l.gateways...) {
			if !p.IsValid() {
				t.Errorf("%s: the prefix %s", answer, p)
			}
		}
	})
}
