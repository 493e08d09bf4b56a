// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/meter"
	"github.com/podlace/podlace/pkg/sandbox"
)

const (
	plugin     = "bandwidth"
	cniVersion = "1.0.0"
	hostSide   = "veth0"
	podSide    = "eth0"
	podName    = "pod"
)

func hostAddress() netip.Prefix { return netip.MustParsePrefix("10.99.0.1/24") }
func podAddress() netip.Prefix  { return netip.MustParsePrefix("10.99.0.2/24") }

// limit is what the plugin of a folder is told, beside the rate.
type limit struct {
	folder, burst string
	latency       time.Duration
}

// pod is linked with the node, and limited.
type pod struct {
	*sandbox.Pod
	shaper kernel.Shaper
}

// withPod calls f with a new pod: a token bucket is full but once.
func withPod(l limit, f func(*pod) error) (err error) {
	made, err := sandbox.NewPod(podName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, made.Close()) }()
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	if err := connect(host, made.Path); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, host.DelLink(hostSide)) }()
	if err := l.run("ADD", made.Path); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.run("DEL", made.Path)) }()
	link, _, err := host.Link(hostSide)
	if err != nil {
		return err
	}
	shaper, ok, err := host.Shaped(link)
	if err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%s has no limit: %v", hostSide, shaper))
	}
	return f(&pod{made, shaper})
}

// connect makes the pair of links.
func connect(host *kernel.Node, netns string) error {
	file, err := os.Open(netns)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	inside, err := kernel.Open(file)
	if err != nil {
		return err
	}
	defer inside.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: hostSide, Pod: podSide, Netns: file}); err != nil {
		return err
	}
	return errors.Join(configure(inside, podSide, podAddress()), configure(&host.NS, hostSide, hostAddress()))
}

func configure(n *kernel.NS, name string, address netip.Prefix) error {
	link, _, err := n.Link(name)
	if err != nil {
		return err
	}
	return errors.Join(n.AddAddress(link, address, false), n.SetUp(link))
}

// config is what a runtime passes for a pod with an annotation for what it may receive.
func (l limit) config(netns string) ([]byte, error) {
	conf := map[string]any{
		"cniVersion": cniVersion, "name": "plot", "type": plugin,
		"capabilities": map[string]bool{"bandwidth": true, "io.kubernetes.cri.pod-annotations": true},
		"prevResult": map[string]any{
			"cniVersion": cniVersion,
			"interfaces": []map[string]string{{"name": hostSide}, {"name": podSide, "sandbox": netns}},
			"ips":        []map[string]any{{"address": podAddress(), "interface": 1}},
		},
	}
	runtime := map[string]any{"bandwidth": map[string]int{"ingressRate": rate, "ingressBurst": runtimeBurst}}
	if l.burst != "" {
		runtime["io.kubernetes.cri.pod-annotations"] = map[string]string{"podlace.io/ingress-burst": l.burst}
	}
	conf["runtimeConfig"] = runtime
	if l.latency > 0 {
		conf["latency"] = l.latency.String()
	}
	return json.Marshal(conf)
}

func (l limit) run(verb, netns string) error {
	conf, err := l.config(netns)
	if err != nil {
		return err
	}
	cmd := exec.Command(filepath.Join(l.folder, plugin))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+podName, "CNI_NETNS="+netns, "CNI_IFNAME="+podSide, "CNI_PATH="+l.folder)
	cmd.Stdin = bytes.NewReader(conf)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", cmd.Path, verb, err, bytes.TrimSpace(out))
	}
	return nil
}

// flow leads from the node into the pod.
func (p *pod) flow(streams int) meter.Flow {
	return meter.Flow{
		Protocol: meter.TCP, To: p.Do, Listen: netip.AddrPortFrom(podAddress().Addr(), 0), Streams: streams, Control: congestion,
	}
}
