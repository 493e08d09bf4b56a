// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// behindLab is a network in which Podlace's chained plugins run after other projects' plugins.
type behindLab struct {
	*harness.Network
	lan, web, client *sandbox.Pod
	rtWeb, rtClient  *libcni.RuntimeConf
	oracle           *harness.Oracle
}

// newBehind reads a conflist of testdata/behind and applies edits, pairs of old and new text. It attaches and detaches a first pod, which
// creates the state that all pods share.
func newBehind(t *testing.T, file string, caps map[string]any, edits ...string) *behindLab {
	t.Helper()
	return behindOf(t, strings.NewReplacer(edits...).Replace(readBehind(t, file)), caps)
}

// behindOf is newBehind with the conflist's text.
func behindOf(t *testing.T, conflist string, caps map[string]any) *behindLab {
	t.Helper()
	b := &behindLab{lan: harness.NewLAN(t)}
	b.Network = openBehind(t, conflist)
	b.web, b.client = harness.NewPod(t, harness.Plain(t)+"-web"), harness.NewPod(t, harness.Plain(t)+"-client")
	b.rtWeb, b.rtClient = harness.Named(b.web, caps), harness.Named(b.client, nil)
	t.Cleanup(func() { // remove the leftovers of a failed test
		for _, rt := range []*libcni.RuntimeConf{b.rtWeb, b.rtClient} {
			_, _ = b.Do("DEL", rt, nil)
		}
	})
	b.Must(t, "ADD", b.rtWeb)
	b.Must(t, "DEL", b.rtWeb)
	b.oracle = harness.Watch(t, b.web, b.client)
	return b
}

func readBehind(t *testing.T, file string) string {
	t.Helper()
	conflist, err := os.ReadFile(filepath.Join("testdata/behind", file))
	if err != nil {
		t.Fatal(err)
	}
	return string(conflist)
}

// openBehind opens a network whose plugins come from Podlace's folder or else from other plugins' folders. It skips the test if one is
// missing.
func openBehind(t *testing.T, conflist string) *harness.Network {
	t.Helper()
	n, err := harness.OpenNetwork([]byte(conflist), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	path := []string{harness.BinDir(), harness.CalicoDir(), harness.ReferenceDir()}
next:
	for _, p := range n.List.Plugins {
		for _, dir := range path {
			if harness.Present(dir, p.Network.Type) {
				continue next
			}
		}
		t.Skipf("SKIPPED: no %s", p.Network.Type)
	}
	n.CNI = libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), n.Exec())
	return n
}

type clientView struct {
	title   string
	from    *sandbox.Pod
	address string
	seen    string // the client's address as the pod sees it without masqAll; empty if it is not compared
}

func (b *behindLab) views(v6 bool) []clientView {
	list := []clientView{
		{"from another machine", b.lan, harness.NodeV4, harness.LANV4},
		{"from the node", nil, harness.NodeV4, ""},
		{"from 127.0.0.1", nil, "127.0.0.1", ""},
		{"from another pod", b.client, harness.NodeV4, ""},
		{"from the pod itself", b.web, harness.NodeV4, ""},
	}
	if v6 {
		list = append(list,
			clientView{"from another machine, IPv6", b.lan, harness.NodeV6, harness.LANV6},
			clientView{"from the node, IPv6", nil, harness.NodeV6, ""},
			clientView{"from another pod, IPv6", b.client, harness.NodeV6, ""},
			clientView{"from the pod itself, IPv6", b.web, harness.NodeV6, ""})
	}
	return list
}

// checkTraffic connects to the hostPort from every client. Those in blocked must not reach it.
func (b *behindLab) checkTraffic(t *testing.T, v6, masqAll bool, blocked ...string) {
	t.Helper()
	server, err := harness.ServeClientAddress(b.web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	none := map[string]bool{}
	for _, title := range blocked {
		none[title] = true
	}
	for _, v := range b.views(v6) {
		seen, err := harness.Dial(v.from, net.JoinHostPort(v.address, "8080"), harness.Patience(none[v.title]))
		switch {
		case none[v.title]:
			if err == nil {
				t.Errorf("%s: the hostPort works, seen as %s; the documents say that it does not", v.title, seen)
			}
		case err != nil:
			t.Errorf("%s: %v", v.title, err)
		case v.seen != "" && (seen == v.seen) == masqAll:
			t.Errorf("%s: the pod sees %s, want %s %t", v.title, seen, v.seen, !masqAll)
		}
	}
}

// runLife runs f and CHECK while both pods are attached, and then DEL of both twice.
func (b *behindLab) runLife(t *testing.T, f func()) {
	t.Helper()
	b.Must(t, "ADD", b.rtWeb)
	b.Must(t, "ADD", b.rtClient)
	f()
	b.Must(t, "CHECK", b.rtWeb)
	b.Must(t, "CHECK", b.rtClient)
	for range 2 {
		b.Must(t, "DEL", b.rtWeb)
		b.Must(t, "DEL", b.rtClient)
	}
	b.oracle.Clean(t, "two pods were attached and detached")
}
