// SPDX-License-Identifier: Apache-2.0

package containerd_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// serve is the container of a web server that names its pod.
const serve = `mkdir /www && hostname > /www/index.html && exec httpd -f -p 8080 -h /www`

// pod is a running sandbox with one container.
type pod struct {
	t         *testing.T
	client    runtimeClient
	config    *cri.PodSandboxConfig
	sandbox   string
	container string
	network
}

// runPod runs a sandbox with a web server in it; the end of the test removes it.
func runPod(t *testing.T, c runtimeClient, name string, options ...podOption) *pod {
	t.Helper()
	p := &pod{t: t, client: c, config: podConfig(name, options...)}
	begin := time.Now()
	var err error
	if p.sandbox, err = c.run(t.Context(), p.config); err != nil {
		t.Fatal(err)
	}
	t.Logf("pod %s: RunPodSandbox %d ms", name, time.Since(begin).Milliseconds())
	t.Cleanup(func() { p.remove() })
	if p.container, err = c.start(t.Context(), p.sandbox, p.config, serve); err != nil {
		t.Fatal(err)
	}
	if p.network, err = c.network(t.Context(), p.sandbox); err != nil {
		t.Fatal(err)
	}
	if !p.v4.IsValid() || !p.v6.IsValid() {
		t.Fatalf("pod %s: addresses %v and %v: want one of each family", name, p.v4, p.v6)
	}
	p.serves("", netip.AddrPortFrom(p.v4, httpPort))
	return p
}

// stop stops the sandbox, which calls DEL.
func (p *pod) stop() {
	p.t.Helper()
	begin := time.Now()
	if err := p.client.stop(context.Background(), p.sandbox); err != nil {
		p.t.Errorf("pod %s: %v", p.config.Metadata.Name, err)
	}
	p.t.Logf("pod %s: StopPodSandbox %d ms", p.config.Metadata.Name, time.Since(begin).Milliseconds())
}

// remove stops and removes the sandbox; once removed, it does nothing.
func (p *pod) remove() {
	p.t.Helper()
	if p.sandbox == "" {
		return
	}
	p.stop()
	if err := p.client.remove(context.Background(), p.sandbox); err != nil {
		p.t.Errorf("pod %s: %v", p.config.Metadata.Name, err)
	}
	p.sandbox = ""
}

// exec runs a command in the container and returns what it writes.
func (p *pod) exec(command ...string) string {
	p.t.Helper()
	r, err := p.client.ExecSync(p.t.Context(), &cri.ExecSyncRequest{ContainerId: p.container, Cmd: command, Timeout: 5})
	if err != nil {
		p.t.Errorf("pod %s: %q: %v", p.config.Metadata.Name, command, err)
		return ""
	}
	if r.ExitCode != 0 {
		p.t.Errorf("pod %s: %q: exit %d: %s", p.config.Metadata.Name, command, r.ExitCode, r.Stderr)
	}
	return string(r.Stdout)
}

// fetch fetches a URL with the container's own wget.
func (p *pod) fetch(url string) string {
	p.t.Helper()
	return strings.TrimSpace(p.exec("wget", "-q", "-O", "-", url))
}

// serves fails the test unless the address answers with the pod's name, asked
// from the named network namespace ("" is the node's own).
func (p *pod) serves(netns string, at netip.AddrPort) {
	p.t.Helper()
	got, err := get(p.t.Context(), netns, "http://"+at.String()+"/")
	if name := p.config.Metadata.Name; err != nil || got != name {
		p.t.Errorf("GET %s from netns %q: %q, %v: want %q", at, netns, got, err, name)
	}
}
