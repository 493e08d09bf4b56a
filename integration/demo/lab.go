// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	podNamespace = "demo"
	limit        = 20_000_000 // bit/s of each pod in each direction
	httpPort     = 80         // TCP port of the pods' servers
	dnsPort      = 53         // UDP port of the pods' servers
	hostHTTP     = 18080      // the hostPort for pod-a's httpPort
	hostDNS      = 18053      // the hostPort for pod-a's dnsPort

	loopbackConflist = `{"cniVersion":"1.0.0","name":"cni-loopback","plugins":[{"type":"loopback"}]}`
	cacheDir         = "/var/lib/cni" // as for container runtimes
)

// lastingFiles matches what a node may keep after its last pod: last_reserved_ip has the address that host-local assigned last, and lock
// files cannot be removed without a race.
const lastingFiles = `/last_reserved_ip\.|/podlace_boot$|/\.lock(-[0-9a-f]+)?$|/lock$`

// stateDirs returns the folders of plugins and libcni.
func stateDirs() []string { return []string{"/var/lib", "/run/podlace"} }

// A pod is a network namespace and, after ADD, an attachment.
type pod struct {
	*sandbox.Pod
	chain.Attachment
	v4, v6 netip.Addr // zero until ADD
	server *server
}

// A lab is the node, the pods and the client.
type lab struct {
	chain    *runner
	loopback *runner
	a, b     *pod
	warm     *pod // first pod, added and deleted so that the baseline contains lasting state
	bad      *pod // its ADD is refused
	client   *sandbox.Pod
	lacks    map[string]string // features that this machine lacks, with the reasons
	adds     []chain.Call      // calls of the previous ADD
	flows    map[string]measuredFlow
	before   *snapshot.Snapshot
	closers  []func()
}

// measuredFlow is the result of one flow of packets, which several steps evaluate.
type measuredFlow struct {
	meter.Result
	err error
}

func openLab(opts runOptions) (*lab, error) {
	l := &lab{flows: map[string]measuredFlow{}}
	err := l.open(opts)
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *lab) open(opts runOptions) (err error) {
	if l.chain, err = newRunner(opts.Plugins, cacheDir, opts.Conflist); err != nil {
		return err
	}
	l.lacks = notPromised(l.chain.Chain)
	if l.loopback, err = newRunner(opts.Plugins, cacheDir, []byte(loopbackConflist)); err != nil {
		return err
	}
	for name, p := range map[string]**pod{"pod-a": &l.a, "pod-b": &l.b, "warm-up": &l.warm, "bad": &l.bad} {
		if *p, err = l.newPod(name); err != nil {
			return err
		}
	}
	http := chain.PortMapping{HostPort: hostHTTP, ContainerPort: httpPort, Protocol: "tcp"}
	dns := chain.PortMapping{HostPort: hostDNS, ContainerPort: dnsPort, Protocol: "udp"}
	l.a.Ports = []chain.PortMapping{http, dns}
	l.warm.Ports = []chain.PortMapping{http, dns}
	l.b.Ports = []chain.PortMapping{{HostPort: hostHTTP + 1, ContainerPort: httpPort, Protocol: "tcp"}}
	l.bad.Ports = []chain.PortMapping{{HostPort: 70000, ContainerPort: httpPort, Protocol: "tcp"}}
	if l.client, err = sandbox.NewPod("client"); err != nil {
		return fmt.Errorf("namespace for the client: %w", err)
	}
	l.closers = append(l.closers, func() { _ = l.client.Close() })
	if err := l.probe(); err != nil {
		return err
	}
	if err := connect(l.client, ipv6Error() == nil); err != nil {
		return fmt.Errorf("connect the client: %w", err)
	}
	l.closers = append(l.closers, func() { _ = disconnect() })
	return nil
}

func (l *lab) newPod(name string) (*pod, error) {
	space, err := sandbox.NewPod(name)
	if err != nil {
		return nil, fmt.Errorf("namespace for %s: %w", name, err)
	}
	id := sha256.Sum256([]byte("demo " + name))
	p := &pod{Pod: space, Attachment: chain.Attachment{
		ContainerID: hex.EncodeToString(id[:]), Netns: space.Path, IfName: "eth0", PodNamespace: podNamespace, PodName: name, Limit: limit,
	}}
	l.closers = append(l.closers, func() {
		p.stopServer()
		_ = p.Close()
	})
	return p, nil
}

func (l *lab) close() {
	for _, c := range l.closers {
		c()
	}
}

// probe finds out which kernel features the machine lacks, whatever the plugins are.
func (l *lab) probe() error {
	if err := bridgeNetfilter(false); err != nil {
		l.lacks[brNetfilter] = "br_netfilter is not loaded"
	}
	if ipv6Error() == nil {
		return nil
	}
	l.lacks[ipv6] = "IPv6 is switched off in this kernel"
	return l.chain.disableIPv6()
}

func ipv6Error() error {
	_, err := os.Stat("/proc/net/if_inet6")
	return err
}

// bridgeNetfilter sets whether iptables rules see bridged packets. This is off by default, and on on nodes prepared for Kubernetes.
func bridgeNetfilter(on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	for _, name := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		if err := os.WriteFile("/proc/sys/net/bridge/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

func (p *pod) storeAddresses(result *types100.Result) {
	for _, ip := range result.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		switch addr = addr.Unmap(); {
		case !ok:
		case addr.Is4():
			p.v4 = addr
		default:
			p.v6 = addr
		}
	}
}

func (p *pod) serve() (err error) {
	p.server, err = serve(p.Do, p.Name)
	return err
}

func (p *pod) stopServer() {
	if p.server != nil {
		p.server.close()
		p.server = nil
	}
}

// recordBaseline stores the node's state, to which it must return by the end.
func (l *lab) recordBaseline() (err error) {
	l.before, err = snapshot.Take(l.watched())
	return err
}

// watched returns the options of the leak check. Pods are not compared, because their state ends with their namespaces.
func (l *lab) watched() snapshot.Options {
	return snapshot.Options{Pods: []*sandbox.Pod{l.client}, Dirs: stateDirs(), Ignore: regexp.MustCompile(lastingFiles)}
}

// stateLeft returns how the node differs from the baseline. It repeats the comparison until nothing is left or the time is up, because the
// kernel deletes namespaces asynchronously, and slowly on a slow machine.
func (l *lab) stateLeft(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for {
		now, err := snapshot.Take(l.watched())
		if err != nil {
			return nil, err
		}
		diff := snapshot.Diff(l.before, now)
		if len(diff) == 0 {
			return nil, nil
		}
		select {
		case <-ctx.Done():
			return diff, nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// firstLines shortens a list to fit into a row of the report.
func firstLines(lines []string, n int) string {
	if len(lines) > n {
		lines = append(lines[:n:n], fmt.Sprintf("and %d more", len(lines)-n))
	}
	return strings.Join(lines, "; ")
}
