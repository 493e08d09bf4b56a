// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/plugin"
)

func parsed(keys, version string, args map[string]string) (Config, error) {
	return Parse(&plugin.Request{Plugin: "bridge", Network: "net", CNIVersion: version, Args: args, Config: []byte("{" + keys + "}"),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
}

func TestParse(t *testing.T) {
	const ipam = `"ipam":{"type":"host-local"}`
	for keys, want := range map[string]Config{
		"":            {Bridge: "cni0"},
		`"bridge":""`: {Bridge: "cni0"},
		`"bridge":"br-x","mtu":9000,"isGateway":true,"forceAddress":true,"hairpinMode":true,"portIsolation":true,"enabledad":true`: {Bridge: "br-x",
			MTU: 9000, Gateway: true, ForceAddress: true, Hairpin: true, Isolated: true, DAD: true},
		`"isDefaultGateway":true,"promiscMode":true`: {Bridge: "cni0", Gateway: true, DefaultGateway: true, Promisc: true},
		`"disableContainerInterface":true`:           {Bridge: "cni0", LeaveDown: true},
		`"mtu":68`:                                   {Bridge: "cni0", MTU: 68},
		`"mtu":65535`:                                {Bridge: "cni0", MTU: 65535},
		ipam:                                         {Bridge: "cni0", IPAM: "host-local"},
		ipam + `,"ipMasq":true`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "nftables", V4: true, V6: true}},
		ipam + `,"ipMasq":true,"ipMasqBackend":""`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "nftables", V4: true, V6: true}},
		ipam + `,"ipMasq":true,"ipMasqBackend":"iptables"`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "iptables", V4: true, V6: true}},
		ipam + `,"ipMasqBackend":"iptables"`: {Bridge: "cni0", IPAM: "host-local"},
		`"mtu":"auto"`:                       {Bridge: "cni0", AutoMTU: true},
		ipam + `,"ipMasq":{}`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "nftables", V4: true, V6: true}},
		ipam + `,"ipMasq":{"nonMasqueradeCIDRs":["useclustercidr","10.0.0.0/8"]}`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "nftables", V4: true, V6: true, UseCluster: true,
				Except: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
		ipam + `,"ipMasq":{"v6":false,"nonMasqueradeCIDRs":["10.0.0.0/8","fd00::/8"]}`: {Bridge: "cni0", IPAM: "host-local",
			Masquerade: Masquerade{Backend: "nftables", V4: true,
				Except: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}},
		ipam + `,"ipMasq":{"v4":false,"v6":false}`: {Bridge: "cni0", IPAM: "host-local"},
		`"ipMasq":true`: {Bridge: "cni0"}, // no ipam: nothing to masquerade
		`"ipam":null`:   {Bridge: "cni0"},
		`"ipam":{}`:     {Bridge: "cni0"},
		`"vlan":100,"vlanTrunk":[{"id":5}],"preserveDefaultVlan":true`: {Bridge: "cni0",
			VLANs: VLANs{ID: 100, Trunk: []uint16{5}, KeepDefault: true}},
		`"dns":{"nameservers":["192.0.2.1"]}`: {Bridge: "cni0", DNS: &types.DNS{Nameservers: []string{"192.0.2.1"}}},
		`"dns":{}`:                            {Bridge: "cni0"},
	} {
		got, err := parsed(keys, "1.1.0", nil)
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", keys, err, diff)
		}
	}
}

func TestParseRefused(t *testing.T) {
	for keys, says := range map[string]string{
		`"mtu":67`: "mtu 67: want 68-65535", `"mtu":65536`: "mtu 65536", `"mtu":-1`: "mtu -1",
		`"bridge":"sixteen-bytes-xx"`: "bridge", `"bridge":"a/b"`: "bridge", `"bridge":"br%d"`: "bridge", `"bridge":"all"`: "bridge",
		`"bridge":".."`:                                                 "bridge",
		`"hairpinMode":true,"promiscMode":true`:                         "exclude each other",
		`"ipMasqBackend":"ipvs"`:                                        `ipMasqBackend "ipvs": want nftables or iptables`,
		`"ipMasq":{"nonMasqueradeCIDRs":["10.0.0.1/8"]}`:                `ipMasq.nonMasqueradeCIDRs "10.0.0.1/8": want a subnet`,
		`"ipMasq":{"nonMasqueradeCIDRs":["10.0.0.0"]}`:                  `want a subnet`,
		`"ipMasq":{"nonMasqueradeCIDRs":["::ffff:10.0.0.0/104"]}`:       `want a subnet`,
		`"antiSpoof":true`:                                              "antiSpoof: needs ipam",
		`"ipam":{"subnet":"10.0.0.0/24"}`:                               "ipam: has no type",
		`"ipam":{"type":"bridge"}`:                                      "want an IPAM plugin, such as host-local",
		`"mtu":"auto","bridge":"a/b"`:                                   "bridge",
		`"ipam":{"type":"../x"}`:                                        "want the name of a plugin",
		`"ipam":{"type":"a/b"}`:                                         "want the name of a plugin",
		`"ipam":{"type":"host-local"},"disableContainerInterface":true`: "cannot be used with ipam",
		`"runtimeConfig":{"mac":"nonsense"}`:                            `mac "nonsense"`,
		`"runtimeConfig":{"mac":"01:00:5e:00:00:01"}`:                   "want a unicast Ethernet address",
		`"runtimeConfig":{"mac":"00:00:00:00:00:00"}`:                   "want a unicast Ethernet address",
		`"runtimeConfig":{"mac":"ff:ff:ff:ff:ff:ff"}`:                   "want a unicast Ethernet address",
		`"args":{"cni":{"mac":"02:00:00:00:00:00:00:01"}}`:              "want a unicast Ethernet address",
	} {
		if c, err := parsed(keys, "1.1.0", nil); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v, want %q", keys, c, err, says)
		}
	}
}

func TestOldVersionsNeedAddresses(t *testing.T) {
	for v, ok := range map[string]bool{"0.1.0": false, "0.2.0": false, "0.3.0": true, "0.4.0": true, "1.1.0": true} {
		if _, err := parsed("", v, nil); (err == nil) != ok {
			t.Errorf("%s without ipam: %v", v, err)
		}
		if _, err := parsed(`"ipam":{"type":"x"}`, v, nil); err != nil {
			t.Errorf("%s with ipam: %v", v, err)
		}
	}
}

// TestMAC checks the order of precedence: runtimeConfig, args, CNI_ARGS.
func TestMAC(t *testing.T) {
	for keys, want := range map[string]string{
		`"runtimeConfig":{"mac":"02:00:00:00:00:01"},"args":{"cni":{"mac":"02:00:00:00:00:02"}}`: "02:00:00:00:00:01",
		`"args":{"cni":{"mac":"02:00:00:00:00:02"}}`:                                             "02:00:00:00:00:02",
		"":                           "02:00:00:00:00:0a",
		`"runtimeConfig":{"mac":""}`: "02:00:00:00:00:0a",
		`"runtimeConfig":{"mac":"02-00-00-00-00-AA"}`: "02:00:00:00:00:aa",
	} {
		c, err := parsed(keys, "1.1.0", map[string]string{"MAC": "02:00:00:00:00:0A"})
		if err != nil || c.MAC.String() != want {
			t.Errorf("%s: %s, %v, want %s", keys, c.MAC, err, want)
		}
	}
	if _, err := parsed("", "1.1.0", map[string]string{"MAC": "x"}); plugin.Code(err) != plugin.CodeConfig {
		t.Errorf("CNI_ARGS: %v", err)
	}
}

func TestRandomMAC(t *testing.T) {
	seen := map[string]bool{}
	for range 50 {
		mac := randomMAC()
		if mac[0]&3 != 2 || len(mac) != 6 || seen[mac.String()] {
			t.Errorf("%s", mac)
		}
		seen[mac.String()] = true
	}
}

// FuzzParse: each error of Parse has an error code, and the kernel accepts every configuration that Parse accepts.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"{}", "", `{"bridge":"x","mtu":1}`, `{"ipam":{"type":"x"},"ipMasq":true}`, `{"vlan":5}`,
		`{"vlanTrunk":[{"id":1}]}`, `{"vlanTrunk":[null]}`,
		`{"runtimeConfig":{"mac":"02:00:00:00:00:01"}}`, `{"args":{"cni":{"mac":7}}}`, `{"args":null,"ipam":[],"dns":null}`,
		`{"ipMasqBackend":null}`} {
		f.Add(seed, "", "1.1.0")
		f.Add(seed, "02:00:00:00:00:0a", "0.2.0")
	}
	f.Fuzz(func(t *testing.T, config, mac, version string) {
		r := &plugin.Request{Network: "net", CNIVersion: version, Args: map[string]string{"MAC": mac}, Config: []byte(config),
			Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
		c, err := Parse(r)
		if err != nil {
			if code := plugin.Code(err); code != plugin.CodeDecode && code != plugin.CodeConfig {
				t.Errorf("%q: code %d, %v", config, code, err)
			}
			return
		}
		if plugin.ValidIfName(c.Bridge) != nil || c.MAC != nil && (len(c.MAC) != 6 || c.MAC[0]&1 != 0) ||
			c.Masquerade.Backend != "" && c.IPAM == "" ||
			strings.ContainsAny(c.IPAM, "/\x00") || c.MTU < 0 || c.LeaveDown && c.IPAM != "" || plugin.ValidIfName(c.gatewayName()) != nil {
			t.Errorf("%q: %+v", config, c)
		}
	})
}
