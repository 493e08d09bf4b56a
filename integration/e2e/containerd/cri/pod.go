// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	api "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// serveName is the command of a container whose web server answers with the name of the pod.
const serveName = `trap "exit 0" TERM; mkdir /www && hostname > /www/index.html && httpd -f -p 8080 -h /www & wait`

// Pod is a running sandbox with one container.
type Pod struct {
	Name    string
	Sandbox string // the ID, "" once the sandbox is removed
	Network
	t         *testing.T
	client    Client
	container string
}

// RunPod runs a sandbox with a web server in it, and removes the sandbox at the end of the test.
func RunPod(t *testing.T, c Client, name string, options ...PodOption) *Pod {
	t.Helper()
	config := PodConfig(name, options...)
	p := &Pod{Name: name, t: t, client: c}
	begin := time.Now()
	var err error
	if p.Sandbox, err = c.Run(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Logf("pod %s: RunPodSandbox %d ms", name, time.Since(begin).Milliseconds())
	t.Cleanup(func() { p.Remove() })
	if p.container, err = c.Start(t.Context(), p.Sandbox, config, serveName); err != nil {
		t.Fatal(err)
	}
	if p.Network, err = c.Network(t.Context(), p.Sandbox); err != nil {
		t.Fatal(err)
	}
	if !p.V4.IsValid() || !p.V6.IsValid() {
		t.Fatalf("pod %s: addresses %v and %v: want one of each family", name, p.V4, p.V6)
	}
	p.Serves("", p.At(p.V4))
	return p
}

// Stop stops the sandbox of the pod, so the runtime calls DEL.
func (p *Pod) Stop() {
	p.t.Helper()
	begin := time.Now()
	if err := p.client.Stop(context.Background(), p.Sandbox); err != nil {
		p.t.Errorf("pod %s: %v", p.Name, err)
	}
	p.t.Logf("pod %s: StopPodSandbox %d ms", p.Name, time.Since(begin).Milliseconds())
}

// Remove stops and removes the sandbox. It is a no-op if there is none.
func (p *Pod) Remove() {
	p.t.Helper()
	if p.Sandbox == "" {
		return
	}
	p.Stop()
	if err := p.client.Remove(context.Background(), p.Sandbox); err != nil {
		p.t.Errorf("pod %s: %v", p.Name, err)
	}
	p.Sandbox = ""
}

// Exec runs a command in the container and returns the output of the command.
func (p *Pod) Exec(command ...string) string {
	p.t.Helper()
	r, err := p.client.ExecSync(p.t.Context(), &api.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 5})
	if err != nil {
		p.t.Errorf("pod %s: %q: %v", p.Name, command, err)
		return ""
	}
	if r.ExitCode != 0 {
		p.t.Errorf("pod %s: %q: exit %d: %s", p.Name, command, r.ExitCode, r.Stderr)
	}
	return string(r.Stdout)
}

// Fetch requests a URL with wget in the container and returns the body of the response.
func (p *Pod) Fetch(url string) string {
	p.t.Helper()
	return strings.TrimSpace(p.Exec("wget", "-q", "-O", "-", url))
}

// Serves fails the test unless the web server at an address sends the pod's name to a client in a network namespace; "" is the node's.
func (p *Pod) Serves(netns string, at netip.AddrPort) {
	p.t.Helper()
	got, err := Get(p.t.Context(), netns, "http://"+at.String()+"/")
	if err != nil || got != p.Name {
		p.t.Errorf("GET %s from netns %q: %q, %v: want %q", at, netns, got, err, p.Name)
	}
}

// ServesOn checks that the pod's web server answers on a port of the node's IPv4 address, for a client on the node.
func (p *Pod) ServesOn(port uint16) {
	p.t.Helper()
	p.Serves("", p.OnNode4(port))
}

// OnNode4 combines the node's IPv4 address with the given port.
func (p *Pod) OnNode4(port uint16) netip.AddrPort { return netip.AddrPortFrom(node4, port) }

// Ignores fails the test if a server accepts a connection to the address.
func (p *Pod) Ignores(netns string, to netip.AddrPort) {
	p.t.Helper()
	err := Place(netns)(func() error {
		conn, err := net.DialTimeout("tcp", to.String(), time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return err
	})
	if err == nil {
		p.t.Errorf("%s accepts a connection from netns %q, and was not expected to", to, netns)
	}
}

// At returns an address of the pod together with the port of the pod's web server.
func (p *Pod) At(addr netip.Addr) netip.AddrPort { return netip.AddrPortFrom(addr, HTTPPort) }

// SeenAsNode checks that another machine sees the pod's IPv4 and IPv6 packets come from the node's address.
func (p *Pod) SeenAsNode() error {
	for _, want := range []netip.Addr{node4, node6} {
		url := ServeAddress(p.t, OutsideNetns, want.Next())
		got, err := Get(p.t.Context(), p.Netns, url)
		if seen, _ := netip.ParseAddrPort(got); err != nil || seen.Addr() != want {
			return fmt.Errorf("%s sees pod %s as %q, %w: want %v", want.Next(), p.Name, got, err, want)
		}
	}
	return nil
}
