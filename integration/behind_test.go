// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/pkg/sandbox"
)

// The node and a machine in its network, which has no route to pods and is the node's router.
const (
	nodeV4, nodeV6 = "192.0.2.1", "2001:db8:92::1"
	lanV4, lanV6   = "192.0.2.2", "2001:db8:92::2"
)

// plain is the name of a test, as a container may be called.
func plain(t *testing.T) string {
	return regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(t.Name(), "-")
}

// newLAN makes that machine and the node's link to it, lan0.
func newLAN(t *testing.T) *sandbox.Pod {
	t.Helper()
	program(t, "ip")
	lan := newPod(t, plain(t)+"-lan")
	shell(t, fmt.Sprintf(`
		ip link add lan0 type veth peer name eth0 netns %[1]s
		ip addr add %[2]s/24 dev lan0; ip -6 addr add %[3]s/64 dev lan0 nodad
		ip -n %[1]s addr add %[4]s/24 dev eth0; ip -n %[1]s -6 addr add %[5]s/64 dev eth0 nodad
		ip link set lan0 up; ip -n %[1]s link set lo up; ip -n %[1]s link set eth0 up
		ip route add default via %[4]s; ip -6 route add default via %[5]s`, lan.Name, nodeV4, nodeV6, lanV4, lanV6))
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "lan0").Run() })
	return lan
}

// behind is a conflist whose chained plugins are Podlace's.
type behind struct {
	*network
	lan, web, client *sandbox.Pod
	rtWeb, rtClient  *libcni.RuntimeConf
	oracle           *oracle
}

// newBehind reads a list of testdata/behind, with edits as pairs of old and new text, and has its plugins make what they make once a node.
func newBehind(t *testing.T, file string, caps map[string]any, edits ...string) *behind {
	t.Helper()
	return behindOf(t, strings.NewReplacer(edits...).Replace(readBehind(t, file)), caps)
}

// behindOf is newBehind with the list itself.
func behindOf(t *testing.T, conflist string, caps map[string]any) *behind {
	t.Helper()
	b := &behind{lan: newLAN(t)}
	b.network = openBehind(t, conflist)
	b.web, b.client = newPod(t, plain(t)+"-web"), newPod(t, plain(t)+"-client")
	b.rtWeb, b.rtClient = named(b.web, caps), named(b.client, nil)
	t.Cleanup(func() { // what a failed test left
		for _, rt := range []*libcni.RuntimeConf{b.rtWeb, b.rtClient} {
			_, _ = b.do("DEL", rt, nil)
		}
	})
	b.must(t, "ADD", b.rtWeb)
	b.must(t, "DEL", b.rtWeb)
	b.oracle = watch(t, b.web, b.client)
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

// openBehind finds Podlace's plugins before those of others, and skips the test when one is missing.
func openBehind(t *testing.T, conflist string) *network {
	t.Helper()
	n, err := openNetwork([]byte(conflist), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	tools := os.Getenv(toolsEnv)
	path := []string{binDir(), tools, filepath.Join(tools, referenceDir)}
next:
	for _, p := range n.list.Plugins {
		for _, dir := range path {
			if present(dir, p.Network.Type) {
				continue next
			}
		}
		t.Skipf("SKIPPED: no %s", p.Network.Type)
	}
	n.cni = libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), n.exec())
	return n
}

// named is an attachment of a pod of that name.
func named(pod *sandbox.Pod, caps map[string]any) *libcni.RuntimeConf {
	rt := attachment(pod, pod.Name, caps)
	for i, arg := range rt.Args {
		if arg[0] == "K8S_POD_NAME" {
			rt.Args[i][1] = pod.Name
		}
	}
	return rt
}

// hostPort is the capability of a pod whose port 80 is 8080 of the node.
func hostPort() map[string]any {
	return map[string]any{"portMappings": []any{object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}
}

// view is one client of the hostPort.
type view struct {
	title   string
	from    *sandbox.Pod
	address string
	seen    string // the address by which the pod sees the client, if it is told
}

func (b *behind) views(v6 bool) []view {
	list := []view{
		{"from another machine", b.lan, nodeV4, lanV4},
		{"from the node", nil, nodeV4, ""},
		{"from 127.0.0.1", nil, "127.0.0.1", ""},
		{"from another pod", b.client, nodeV4, ""},
		{"from the pod itself", b.web, nodeV4, ""},
	}
	if v6 {
		list = append(list,
			view{"from another machine, IPv6", b.lan, nodeV6, lanV6},
			view{"from the node, IPv6", nil, nodeV6, ""},
			view{"from another pod, IPv6", b.client, nodeV6, ""},
			view{"from the pod itself, IPv6", b.web, nodeV6, ""})
	}
	return list
}

// traffic connects to the hostPort from everywhere. blocked are the titles of views that cannot work.
func (b *behind) traffic(t *testing.T, v6, masqAll bool, blocked ...string) {
	t.Helper()
	server, err := tellClients(b.web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	none := map[string]bool{}
	for _, title := range blocked {
		none[title] = true
	}
	for _, v := range b.views(v6) {
		seen, err := dial(v.from, net.JoinHostPort(v.address, "8080"), patience(none[v.title]))
		switch {
		case none[v.title]:
			if err == nil {
				t.Errorf("%s: reached, seen as %s; that it is not reached is documented", v.title, seen)
			}
		case err != nil:
			t.Errorf("%s: %v", v.title, err)
		case v.seen != "" && (seen == v.seen) == masqAll:
			t.Errorf("%s: the pod sees %s, want %s %t", v.title, seen, v.seen, !masqAll)
		}
	}
}

// tellClients answers every connection with the address of the client.
func tellClients(pod *sandbox.Pod, port int) (net.Listener, error) {
	var l net.Listener
	err := networked(pod, func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			client, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			_, _ = fmt.Fprint(c, client)
			_ = c.Close()
		}
	}()
	return l, nil
}

// life attaches both pods, calls f, checks, and takes everything away again, twice.
func (b *behind) life(t *testing.T, f func()) {
	t.Helper()
	b.must(t, "ADD", b.rtWeb)
	b.must(t, "ADD", b.rtClient)
	f()
	b.must(t, "CHECK", b.rtWeb)
	b.must(t, "CHECK", b.rtClient)
	for range 2 {
		b.must(t, "DEL", b.rtWeb)
		b.must(t, "DEL", b.rtClient)
	}
	b.oracle.clean(t, "two pods came and went")
}
