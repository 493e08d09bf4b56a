// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/store"
)

const (
	connectionRounds = 15
	connectionsOfOne = 500 // connections in one sample
	connectionsTold  = 100 // the table shows the time of this many
	connectionPort   = 8080
)

// measureConnections measures connections from another machine to a hostPort: alone on the node, beside a few pods with many ports, and
// beside many pods with one port each. The reference plugin uses iptables, its default.
func (r *report) measureConnections(o options, n nodes) {
	count := o.scaledSize(otherPorts)
	packed, spread := map[string]figure{}, map[string]figure{}
	for _, side := range o.bothSides() {
		backend := "nftables"
		if side.name == sideReference {
			backend = "iptables"
		}
		var of [3]*hostPort
		var err error
		for i, beside := range []otherPods{{}, {count, portsOfPod}, {count, 1}} {
			if err == nil {
				of[i], err = n.hostPortOf(side, backend, beside)
			}
		}
		for i := 0; err == nil && i < connectionRounds; i++ {
			// Rotate the order, so that no case is always the first.
			err = errors.Join(of[i%3].sampleConnections(), of[(i+1)%3].sampleConnections(), of[(i+2)%3].sampleConnections())
		}
		if err != nil {
			r.fail("connections, "+side.name, err)
			return
		}
		packed[side.name] = figure{Base: of[0].hundredConnections(), Value: of[1].hundredConnections()}
		spread[side.name] = figure{Base: of[0].hundredConnections(), Value: of[2].hundredConnections()}
	}
	for _, c := range []struct {
		whose string
		sides map[string]figure
	}{{fmt.Sprintf("of pods with %d each", portsOfPod), packed}, {"of as many pods", spread}} {
		what := fmt.Sprintf("%s hostPorts %s", thousands(count), c.whose)
		r.addGrowth(fmt.Sprintf("%d connections to a hostPort, %s", connectionsTold, what), growthBar, c.sides)
		r.addLoad(fmt.Sprintf("%d connections to a hostPort beside %s; the reference by iptables", connectionsTold, what), 0, c.sides)
	}
}

// otherPods is the total number of other pods' hostPorts, and the number that each pod has.
type otherPods struct{ count, each int }

// cloneRules simulates many pods by copies of a real pod's iptables rules with other ports. They come before its own rules, as if those
// pods had been attached earlier. Real ADDs would take hours with the reference plugin.
func cloneRules(c *chain, count int) error {
	return c.node.Do(func() error {
		out, err := exec.Command("iptables-save", "-t", "nat").Output()
		if err != nil {
			return fmt.Errorf("iptables-save: %w", err)
		}
		own := regexp.MustCompile(`CNI-DN-[0-9a-f]+`).FindString(string(out))
		if own == "" {
			return errors.New("the pod has no chain")
		}
		for first := 0; first < count; first += clonesAtOnce {
			if err := restoreClones(string(out), own, first, min(first+clonesAtOnce, count)); err != nil {
				return err
			}
		}
		return nil
	})
}

// clonesAtOnce is the maximum number of simulated pods in one message to the kernel.
const clonesAtOnce = 40

// restoreClones adds the rules of the simulated pods from first to end-1. saved are the rules of the real pod, own is the name of its
// chain.
func restoreClones(saved, own string, first, end int) error {
	var input strings.Builder
	input.WriteString("*nat\n")
	for i := first; i < end; i++ {
		chain := fmt.Sprintf("CNI-DN-%021x", i)
		of := strings.NewReplacer(own, chain, fmt.Sprint(connectionPort), fmt.Sprint(20000+i), "10.98.0.5",
			fmt.Sprintf("10.98.%d.%d", 1+i/250, 1+i%250),
			"-A CNI-HOSTPORT-DNAT", "-I CNI-HOSTPORT-DNAT 1")
		fmt.Fprintf(&input, ":%s - [0:0]\n", chain)
		for line := range strings.Lines(saved) {
			if strings.HasPrefix(line, "-A") && strings.Contains(line, own) {
				input.WriteString(of.Replace(line))
			}
		}
	}
	input.WriteString("COMMIT\n")
	restore := exec.Command("iptables-restore", "--noflush")
	restore.Stdin = strings.NewReader(input.String())
	if out, err := restore.CombinedOutput(); err != nil {
		return fmt.Errorf("iptables-restore: %w: %s", err, out)
	}
	return nil
}

// hostPort is a pod's hostPort with the client machine that connects to it.
type hostPort struct {
	client  *sandbox.Pod
	to      unix.SockaddrInet4
	samples []time.Duration
}

// hostPortOf creates a node with other pods' hostPorts, and a pod that accepts all connections to its own.
func (n nodes) hostPortOf(side pluginSet, backend string, beside otherPods) (*hostPort, error) {
	name := fmt.Sprintf("connect-%s-%d-%d", side.name, beside.count, beside.each)
	clone := backend == "iptables" && beside.each == 1
	pod, node, outside := netip.MustParsePrefix("10.98.0.5/16"), netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("192.0.2.2/24")
	// All simulated nodes share the folder of records, so those of an earlier node would make the hostPort look taken.
	if err := os.RemoveAll(store.Root); err != nil {
		return nil, err
	}
	c, err := n.chainOf(name, name+"-node", side, portmapAlone(backend, pod.Addr().String(), connectionPort, 1))
	if err != nil {
		return nil, err
	}
	client, err := n.open(name + "-client")
	if err == nil {
		err = portsNode(c)
	}
	if err == nil && !clone {
		err = n.fillPorts(c, backend, beside)
	}
	if err == nil {
		err = c.run(verbAdd, executeProcess)
	}
	if err == nil && clone {
		err = cloneRules(c, beside.count)
	}
	if err == nil {
		err = joinByVeth(c.node, "client", "", client, netip.Prefix{}, node, outside)
	}
	if err == nil {
		err = joinByVeth(c.node, "pod", portsBridge, c.pod, netip.MustParsePrefix("10.98.0.1/16"), netip.Prefix{}, pod)
	}
	if err != nil {
		return nil, err
	}
	to := unix.SockaddrInet4{Port: connectionPort, Addr: node.Addr().As4()}
	return &hostPort{client: client, to: to}, c.pod.Do(func() error { return acceptAll(netip.AddrPortFrom(pod.Addr(), 80)) })
}

// joinByVeth connects a namespace to a node, whose end of the veth pair is a bridge port or has an address.
func joinByVeth(node *sandbox.Pod, name, bridge string, with *sandbox.Pod, gateway, here, there netip.Prefix) error {
	netns, err := os.Open(with.Path)
	if err != nil {
		return err
	}
	defer netns.Close()
	err = node.Do(func() error {
		host, err := kernel.Host()
		if err != nil {
			return err
		}
		defer host.Close()
		master, _, err := host.Link(bridge)
		if err == nil {
			_, err = host.AddVeth(kernel.Veth{Host: name, Pod: podInterface, Master: master.Index, Netns: netns})
		}
		if err != nil {
			return err
		}
		link, _, err := host.Link(name)
		if err == nil && here.IsValid() {
			err = host.AddAddress(link, here, false)
		}
		return errors.Join(err, host.SetUp(link), host.Set(kernel.Sysctl{Path: "ipv4/ip_forward", Value: "1"}))
	})
	if err != nil {
		return err
	}
	inside, err := kernel.Open(netns)
	if err != nil {
		return err
	}
	defer inside.Close()
	link, _, err := inside.Link(podInterface)
	if err == nil {
		err = errors.Join(inside.AddAddress(link, there, false), inside.SetUp(link))
	}
	if err == nil && gateway.IsValid() {
		err = inside.AddRoute(link, kernel.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: gateway.Addr()})
	}
	return err
}

// acceptAll accepts and closes connections until the process ends.
func acceptAll(at netip.AddrPort) error {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	return nil
}

func (h *hostPort) sampleConnections() error {
	return h.client.Do(func() error {
		start := time.Now()
		for range connectionsOfOne {
			if err := connectOnce(&h.to); err != nil {
				return err
			}
		}
		h.samples = append(h.samples, time.Since(start))
		return nil
	})
}

// connectOnce opens a connection and resets it, so that the client's port does not stay in TIME_WAIT.
func connectOnce(to unix.Sockaddr) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = unix.Connect(s, to)
	return errors.Join(err, unix.SetsockoptLinger(s, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), unix.Close(s))
}

// hundredConnections returns the median time of 100 connections, in milliseconds.
func (h *hostPort) hundredConnections() float64 {
	return p50(h.samples) * connectionsTold / connectionsOfOne
}
