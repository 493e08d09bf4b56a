// SPDX-License-Identifier: Apache-2.0

// Command calico is a test double of Calico's main plugin. It connects a pod by a veth pair without a bridge, with addresses of prefix
// length 32 or 128 from the configured IPAM plugin, in whose configuration it replaces usePodCidr and usePodCidrIPv6. The IPv4 gateway is
// an address of no machine, for which the node answers ARP (proxy_arp); the IPv6 gateway is the node's link-local address. The node has a
// route to each pod, and the result has no interface of it.
package main

import (
	"bytes"
	"crypto/sha1"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/podlace/podlace/pkg/kernel"
)

// Calico reads podCIDR and podCIDRIPv6 from the API server. The test double uses constants.
const (
	podCIDR     = "10.73.0.0/24"
	podCIDRIPv6 = "fd73::/64"
)

// hostMAC is the MAC of the host-side veths, from which the kernel derives gatewayIPv6. The pods' gateways are gateway and gatewayIPv6.
const (
	hostMAC     = "ee:ee:ee:ee:ee:ee"
	gateway     = "169.254.1.1"
	gatewayIPv6 = "fe80::ecee:eeff:feee:eeee"
)

type netConfig struct {
	CNIVersion string `json:"cniVersion"`
	IPAM       struct {
		Type string `json:"type"`
	} `json:"ipam"`
	stdin []byte
}

func main() {
	var conf netConfig
	if err := run(&conf); err != nil {
		answer, _ := json.Marshal(types.Error{Code: types.ErrInternal, Msg: "calico: " + err.Error()})
		fmt.Println(string(answer))
		os.Exit(1)
	}
}

func run(conf *netConfig) error {
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	stdin = bytes.ReplaceAll(stdin, []byte(`"usePodCidrIPv6"`), []byte(`"`+podCIDRIPv6+`"`))
	conf.stdin = bytes.ReplaceAll(stdin, []byte(`"usePodCidr"`), []byte(`"`+podCIDR+`"`))
	if err := json.Unmarshal(conf.stdin, conf); err != nil {
		return err
	}
	switch os.Getenv("CNI_COMMAND") {
	case "ADD":
		return add(conf)
	case "DEL":
		_, err := conf.runIPAM()
		return errors.Join(err, del())
	}
	return nil // Calico's CHECK checks nothing
}

func (c *netConfig) runIPAM() ([]byte, error) {
	for _, dir := range filepath.SplitList(os.Getenv("CNI_PATH")) {
		path := filepath.Join(dir, c.IPAM.Type)
		if _, err := os.Stat(path); err != nil {
			continue
		}
		cmd := exec.Command(path)
		cmd.Stdin, cmd.Stderr = bytes.NewReader(c.stdin), os.Stderr
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%s: %w: %s", path, err, out)
		}
		return out, err
	}
	return nil, fmt.Errorf("no %s in %s", c.IPAM.Type, os.Getenv("CNI_PATH"))
}

// linkName returns the host-side veth's name, with eleven hexadecimal digits of a hash of the pod's name.
func linkName() string {
	pod := map[string]string{}
	for _, pair := range strings.Split(os.Getenv("CNI_ARGS"), ";") {
		key, value, _ := strings.Cut(pair, "=")
		pod[key] = value
	}
	sum := sha1.Sum([]byte(pod["K8S_POD_NAMESPACE"] + "." + pod["K8S_POD_NAME"]))
	return "cali" + hex.EncodeToString(sum[:])[:11]
}

func add(conf *netConfig) error {
	out, err := conf.runIPAM()
	if err != nil {
		return err
	}
	leased, err := create.Create(conf.CNIVersion, out)
	if err != nil {
		return err
	}
	leases, err := types100.NewResultFromResult(leased)
	if err != nil {
		return err
	}
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, Interfaces: []*types100.Interface{{Name: linkName()}}}
	var pods []netip.Prefix
	for _, ip := range leases.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if !ok {
			return fmt.Errorf("address %s", &ip.Address)
		}
		alone := netip.PrefixFrom(p.Addr(), p.Addr().BitLen())
		pods = append(pods, alone)
		result.IPs = append(result.IPs, &types100.IPConfig{Address: *kernel.IPNet(alone)})
	}
	if err := connect(pods); err != nil {
		return err
	}
	return types.PrintResult(result, conf.CNIVersion)
}

func connect(pods []netip.Prefix) error {
	netns, err := os.Open(os.Getenv("CNI_NETNS"))
	if err != nil {
		return err
	}
	defer netns.Close()
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	inside, err := kernel.Open(netns)
	if err != nil {
		return err
	}
	defer inside.Close()
	mac, err := net.ParseMAC(hostMAC)
	if err != nil {
		return err
	}
	name, ifname := linkName(), os.Getenv("CNI_IFNAME")
	if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: ifname, HostMAC: mac, Netns: netns}); err != nil {
		return err
	}
	hostSide, _, err := host.Link(name)
	if err != nil {
		return err
	}
	podSide, _, err := inside.Link(ifname)
	if err != nil {
		return err
	}
	return errors.Join(setUpHost(host, hostSide, pods), setUpPod(inside, podSide, pods))
}

// setUpHost configures the node as Calico's agent does. It leaves route_localnet to the tested plugin.
func setUpHost(host *kernel.Node, link kernel.Link, pods []netip.Prefix) error {
	err := errors.Join(host.Set(
		kernel.Sysctl{Path: "ipv4/ip_forward", Value: "1"},
		kernel.Sysctl{Path: "ipv6/conf/all/forwarding", Value: "1"},
		kernel.Sysctl{Path: "ipv4/conf/" + link.Name + "/rp_filter", Value: "1"},
		kernel.Sysctl{Path: "ipv4/conf/" + link.Name + "/proxy_arp", Value: "1"},
		kernel.Sysctl{Path: "ipv4/neigh/" + link.Name + "/proxy_delay", Value: "0"},
		kernel.Sysctl{Path: "ipv6/conf/" + link.Name + "/accept_dad", Value: "0"},
	), host.SetUp(link))
	for _, p := range pods {
		err = errors.Join(err, host.AddRoute(link, kernel.Route{Dst: p}))
	}
	return err
}

func setUpPod(pod *kernel.NS, link kernel.Link, pods []netip.Prefix) error {
	err := errors.Join(pod.Set(kernel.Sysctl{Path: "ipv6/conf/" + link.Name + "/accept_dad", Value: "0"}), pod.SetUp(link))
	for _, p := range pods {
		err = errors.Join(err, pod.AddAddress(link, p, false))
		via, all := netip.MustParseAddr(gateway), "0.0.0.0/0"
		if p.Addr().Is6() {
			via, all = netip.MustParseAddr(gatewayIPv6), "::/0"
		} else {
			err = errors.Join(err, pod.AddRoute(link, kernel.Route{Dst: netip.PrefixFrom(via, via.BitLen())}))
		}
		err = errors.Join(err, pod.AddRoute(link, kernel.Route{Dst: netip.MustParsePrefix(all), Gateway: via}))
	}
	return err
}

func del() error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	return host.DelLink(linkName())
}
