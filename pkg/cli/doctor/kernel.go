// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/nodefile"
)

// feature is a kernel feature that Podlace needs. try uses it in a network namespace of its own.
type feature struct {
	name   string
	option string // of the kernel's configuration
	module string
	needed string // what needs it
	key    string // text in the configuration of each network that needs it, or ""
	level  Level  // when it is missing
	try    func(*kernel.Node) error
}

// features returns the kernel features that the plugins need; podlace-node reports its own. Each is tested by using it, which makes the
// kernel load its module if there is one.
func features() []feature {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	return []feature{
		{"veth pairs", "CONFIG_VETH", "veth", "bridge", "", Error, func(n *kernel.Node) error {
			_, err := n.AddVeth(kernel.Veth{Host: "veth0", Pod: "veth1"})
			return err
		}},
		{"bridges", "CONFIG_BRIDGE", "bridge", "bridge", "", Error, func(n *kernel.Node) error {
			return n.AddBridge("bridge0", mac, 0, false, false)
		}},
		{"VLANs on bridges", "CONFIG_BRIDGE_VLAN_FILTERING", "bridge", "bridge with vlan or vlanTrunk", `"vlan`, Warning, tryVLANs},
		{"nf_tables", "CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET", "nf_tables", "bridge with ipMasq or antiSpoof, portmap", "", Error, tryTables},
		{"token bucket filters", "CONFIG_NET_SCH_TBF", "sch_tbf", "bandwidth", "bandwidth", Warning, func(n *kernel.Node) error {
			return onLink(n, "veth0", func(l kernel.Link) error {
				return n.Shape(l, kernel.Bucket{Rate: 1e6, Burst: 1e5, Limit: 1e5})
			})
		}},
		{"redirects to an ifb device", "CONFIG_IFB, CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED", "ifb", "bandwidth",
			"bandwidth", Warning, tryRedirect},
		{"IPv6", "CONFIG_IPV6", "ipv6", "IPv6 addresses", "::", Warning, func(n *kernel.Node) error {
			_, err := n.Get("ipv6/conf/all/forwarding")
			return err
		}},
	}
}

func tryVLANs(n *kernel.Node) error {
	has, err := n.HasVLANFiltering()
	if err == nil && !has {
		err = errors.New("the kernel does not know the setting vlan_filtering")
	}
	return err
}

func tryTables(*kernel.Node) error {
	if !nft.Available() {
		return errors.New("nfnetlink does not know nf_tables")
	}
	return nil
}

func tryRedirect(n *kernel.Node) error {
	return onLink(n, "veth1", func(l kernel.Link) error {
		ifb, err := n.EnsureIFB("ifb-probe", l)
		if err == nil {
			err = n.Redirect(l, ifb)
		}
		return err
	})
}

func onLink(n *kernel.Node, name string, f func(kernel.Link) error) error {
	link, ok, err := n.Link(name)
	if err == nil && ok {
		err = f(link)
	}
	return err
}

func (n *node) kernelFeatures() (found []Finding) {
	err := kernel.InScratch(func(scratch *kernel.Node) error {
		for _, f := range features() {
			if err := f.try(scratch); err != nil && n.needs(f) {
				found = append(found, f.missing(err))
			}
		}
		return nil
	})
	return append(found, unknown("the features of the kernel", err)...)
}

// needs reports whether this node's networks may need a feature. Without a network each feature counts.
func (n *node) needs(f feature) bool {
	named := func(net reconcile.Network) bool { return bytes.Contains(net.Text, []byte(f.key)) }
	return len(n.ownNetworks()) == 0 || slices.ContainsFunc(n.ownNetworks(), named)
}

func (f feature) missing(err error) Finding {
	command := "boot a kernel with " + f.option
	if f.module != "" {
		command = fmt.Sprintf("modprobe %s; if there is no such module: %s", f.module, command)
	}
	return Finding{Level: f.level, What: "the kernel has no " + f.name, Evidence: err.Error(), Consequence: "needed by: " + f.needed,
		Command: command}
}

// bridges returns the bridges in the configurations of Podlace's networks.
func (n *node) bridges() (names []string) {
	for _, net := range n.ownNetworks() {
		if config := net.Plugin("bridge"); config != nil {
			names = append(names, bridge.NameIn(config))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// routedBridges returns the bridges whose packets the node forwards, of configurations and of live pods. A bridge of layer 2 may hold the
// node's uplink, so it must not enter a zone without a filter, and its manager keeps it.
func (n *node) routedBridges() (names []string) {
	uplinks, _ := n.host.Uplinks()
	for _, net := range n.ownNetworks() {
		config := net.Plugin("bridge")
		var keys struct{ IsGateway, IsDefaultGateway bool }
		name := bridge.NameIn(config)
		if json.Unmarshal(config, &keys) == nil && (keys.IsGateway || keys.IsDefaultGateway) {
			names = append(names, name)
		}
	}
	live, _ := n.liveGateways() // the check "forwarding" reports the error
	for _, rec := range live {
		names = append(names, rec.Bridge)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return slices.Contains(uplinks, name) })
}

// liveGateways returns the records of live pods with a gateway address on their bridge.
func (n *node) liveGateways() (live []bridge.RecordedGateways, err error) {
	records, err := bridge.Gateways()
	for _, rec := range records {
		if pod := n.attachment(rec.Key); pod != nil && pod.State == reconcile.Alive && len(rec.Gateways) > 0 {
			live = append(live, rec)
		}
	}
	return live, errors.Join(err, n.attachmentsErr)
}

// number reads a setting below /proc/sys/net. ok is false if the kernel lacks it.
func (n *node) number(path string) (value int, ok bool) {
	text, err := n.host.Get(path)
	if err == nil {
		value, err = strconv.Atoi(text)
	}
	return value, err == nil
}

// forwarding reports a node with live pods, or with podCIDRs in node.json, that does not forward packets. With isGateway, each ADD enables
// forwarding; the agent enables it for podCIDRs, but not with "routes": false.
func (n *node) forwarding() (found []Finding) {
	live, err := n.liveGateways()
	if err != nil {
		return unknown("the records", err)
	}
	forwards := map[bool]bool{} // whether a pod has, or may get, a gateway of IPv4, and of IPv6
	if path, file, err := nodefile.Read(); err == nil && path == nodefile.Path {
		for _, cidr := range file.PodCIDRs {
			forwards[cidr.Addr().Is4()] = true
		}
	}
	for _, rec := range live {
		for _, gw := range rec.Gateways {
			forwards[gw.Addr().Is4()] = true
		}
	}
	if len(forwards) == 0 {
		return skipped("no pod with a gateway lives here, and node.json has no podCIDRs; bridge enables forwarding with the first one")
	}
	settings := []struct{ path, key string }{
		{"ipv4/ip_forward", "net.ipv4.ip_forward"}, {forwarding6, "net.ipv6.conf.all.forwarding"}}
	if all, _ := n.number("ipv4/ip_forward"); all != 0 { // setting ip_forward also sets forwarding of all links
		uplinks, _ := n.host.Uplinks()
		links := append(n.bridges(), uplinks...)
		slices.Sort(links)
		for _, name := range slices.Compact(links) { // the kernel forwards an IPv4 packet by the setting of its ingress link
			settings = append(settings, struct{ path, key string }{"ipv4/conf/" + name + "/forwarding",
				"net.ipv4.conf." + keyOf(name) + ".forwarding"})
		}
	}
	for _, f := range settings {
		if value, ok := n.number(f.path); ok && value == 0 && forwards[strings.HasPrefix(f.path, "ipv4")] {
			found = append(found, Finding{Level: Error, What: "forwarding is disabled", Evidence: f.key + " = 0",
				Consequence: "pods reach nothing beyond their node",
				Command:     n.keepAdvertised(f.path) + "sysctl -w " + f.key + "=1; grep -r " + f.key + " /etc/sysctl.*",
				Fix:         func() error { return n.set(f.path, "1") }})
		}
	}
	return found
}

// keyOf returns a link's name as in a key of sysctl(8), which treats a dot as a separator and a slash as a dot.
func keyOf(link string) string { return strings.ReplaceAll(link, ".", "/") }

// forwarding6 is the sysctl that enables IPv6 forwarding. With it, the kernel ignores router advertisements on links with accept_ra = 1.
const forwarding6 = "ipv6/conf/all/forwarding"

// keepAdvertised returns the commands that keep the default route of a router advertisement and must run before IPv6 forwarding is enabled.
// For other settings it returns "".
func (n *node) keepAdvertised(path string) (commands string) {
	uplinks, err := n.host.Uplinks()
	if path != forwarding6 || err != nil {
		return ""
	}
	for _, link := range uplinks {
		if value, ok := n.number("ipv6/conf/" + link + "/accept_ra"); ok && value == 1 {
			commands += fmt.Sprintf("sysctl -w net.ipv6.conf.%s.accept_ra=2; ", keyOf(link))
		}
	}
	return commands
}

// set changes a setting below /proc/sys/net. It opens a connection to the kernel, because doctor closes its own after the examination.
func (n *node) set(path, value string) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	if path == forwarding6 {
		if err := host.KeepRouterAdvertisements(); err != nil {
			return err
		}
	}
	return host.Set(kernel.Sysctl{Path: path, Value: value})
}

// rpFilter reports strict reverse path filters on a node with several uplinks, where replies may use another uplink than the requests and
// are dropped.
func (n *node) rpFilter() (found []Finding) {
	uplinks, err := n.host.Uplinks()
	if err != nil {
		return unknown("the uplinks", err)
	}
	all, _ := n.number("ipv4/conf/all/rp_filter")
	for _, link := range append(n.bridges(), uplinks...) {
		value, ok := n.number("ipv4/conf/" + link + "/rp_filter")
		if !ok || max(all, value) != 1 || len(uplinks) < 2 {
			continue
		}
		found = append(found, Finding{Level: Warning, What: "the reverse path filter of " + link + " is strict",
			Evidence:    fmt.Sprintf("net.ipv4.conf.%s.rp_filter = %d, all = %d; uplinks: %s", link, value, all, strings.Join(uplinks, ", ")),
			Consequence: "packets that arrive on one uplink, while the route back leads through another, are dropped",
			Command:     fmt.Sprintf("sysctl -w net.ipv4.conf.%s.rp_filter=2", keyOf(link))})
	}
	return found
}

// routerAdvertisements reports uplinks with an advertised default route on which the kernel ignores router advertisements because
// forwarding is on (accept_ra in Documentation/networking/ip-sysctl.rst).
func (n *node) routerAdvertisements() (found []Finding) {
	if value, ok := n.number("ipv6/conf/all/forwarding"); !ok || value == 0 {
		return skipped("IPv6 forwarding is disabled")
	}
	links, err := n.host.AdvertisedUplinks()
	if err != nil {
		return unknown("the routes of router advertisements", err)
	}
	for _, link := range links {
		path := "ipv6/conf/" + link + "/accept_ra"
		if value, ok := n.number(path); ok && value == 1 && !n.running["NetworkManager"] && !n.running["systemd-network"] {
			found = append(found, Finding{Level: Warning, What: "the kernel ignores router advertisements on " + link,
				Evidence:    fmt.Sprintf("net.ipv6.conf.%s.accept_ra = 1 with forwarding enabled, and no network manager runs", link),
				Consequence: "a default route that a router announced expires, and the node loses IPv6",
				Command:     fmt.Sprintf("sysctl -w net.ipv6.conf.%s.accept_ra=2", keyOf(link)),
				Fix:         func() error { return n.set(path, "2") }})
		}
	}
	return found
}

// mtu reports bridges whose MTU exceeds the uplink's.
func (n *node) mtu() (found []Finding) {
	uplink, err := n.host.UplinkMTU()
	if err != nil || uplink == 0 {
		return skipped("there is no default route, so no uplink to compare with")
	}
	for _, name := range n.bridges() {
		link, ok, err := n.host.Link(name)
		if err != nil || !ok || link.MTU <= uplink {
			continue
		}
		found = append(found, Finding{Level: Warning, What: "the MTU of " + name + " exceeds that of the uplink",
			Evidence:    fmt.Sprintf("%s has %d bytes, the uplink %d", name, link.MTU, uplink),
			Consequence: "large packets of pods need fragmentation, and fail where ICMP is filtered",
			Command:     `set "mtu": "auto" in the configuration of bridge; new pods get the uplink's MTU`})
	}
	return found
}

// fullAt is the used share of a kernel table or address range, in percent, at which checks warn.
const fullAt = 90

func (n *node) conntrack() []Finding {
	count, ok := n.number("netfilter/nf_conntrack_count")
	most, ok2 := n.number("netfilter/nf_conntrack_max")
	if !ok || !ok2 {
		return skipped("connection tracking is not loaded")
	}
	return fullConntrack(count, most)
}

func fullConntrack(count, most int) []Finding {
	if most == 0 || count*100 < most*fullAt {
		return nil
	}
	return []Finding{{Level: Error, What: "the connection table is almost full",
		Evidence:    fmt.Sprintf("net.netfilter.nf_conntrack_count = %d of nf_conntrack_max = %d", count, most),
		Consequence: "packets of new connections are dropped (kernel log: nf_conntrack: table full)",
		Command:     fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d", 2*most)}}
}

// neighbours compares the limit of the kernel's neighbour table with the number of peers. The kernel shows the limit only in the node's own
// network namespace.
func (n *node) neighbours() (found []Finding) {
	agent, _ := readAgentStatus()
	peers := len(agent.Peers)
	for _, family := range []string{"ipv4", "ipv6"} {
		if most, ok := n.number(family + "/neigh/default/gc_thresh3"); ok {
			found = append(found, fewNeighbours(family, most, peers)...)
		}
	}
	return found
}

func fewNeighbours(family string, most, peers int) []Finding {
	if most >= 2*peers {
		return nil
	}
	return []Finding{{Level: Warning, What: "the neighbour table is small for this cluster",
		Evidence:    fmt.Sprintf("net.%s.neigh.default.gc_thresh3 = %d, podlace-node knows %d peers", family, most, peers),
		Consequence: "with routes over one link the node needs an entry for each peer, and drops packets beyond the limit",
		Command:     fmt.Sprintf("sysctl -w net.%s.neigh.default.gc_thresh3=%d", family, max(4096, 4*peers))}}
}
