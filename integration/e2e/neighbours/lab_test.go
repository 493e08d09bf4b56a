// SPDX-License-Identifier: Apache-2.0

package neighbours

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// The shipped configurations, by the backend of their rules.
const (
	byNftables = conf.Default
	byIPTables = "10-podlace-iptables.conflist"
)

// A lab is the node with its network of pods. The node is that of scripts/node.sh, without what an earlier test left.
type lab struct {
	*testing.T
	network     *harness.Network
	outside     *sandbox.Pod // the node's router, which has no route to pods
	web, client *sandbox.Pod // pods: port 8080 of the node is mapped to port 80 of web
	docker      bool         // port 8090 of the node is mapped to a container of Docker
}

func newLab(t *testing.T, conflist string, replace ...string) *lab {
	t.Helper()
	if os.Getenv(packagesEnv) == "" {
		t.Skip("SKIPPED: NEIGHBOURS is not set; make neighbours fetches firewalld and Docker, and sets it")
	}
	node.Skip(t)
	t.Cleanup(func() {
		harness.Shell(t, `
			nft flush ruleset
			for link in cni0 docker0; do ip link del $link 2>/dev/null || :; done
			sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0
			rm -rf /run/podlace /var/lib/cni/* /etc/cni/net.d/* /etc/firewalld /etc/sysctl.d/50-podlace.conf
			cp -a /run/firewalld.shipped /etc/firewalld`)
	})
	text, err := conf.Conflist(conflist)
	text = []byte(strings.NewReplacer(replace...).Replace(string(text)))
	kerneltest.Must(t, err, os.WriteFile("/etc/cni/net.d/"+conflist, text, 0o600))
	network, err := harness.OpenNetwork(text, t.TempDir(), nil)
	kerneltest.Must(t, err)
	return &lab{T: t, network: network, outside: &sandbox.Pod{Name: "outside", Path: "/run/netns/outside"}}
}

// addPods attaches both pods and starts servers in them, outside and on the node.
func (l *lab) addPods() {
	l.Helper()
	l.web, l.client = harness.NewPod(l, "web"), harness.NewPod(l, "client")
	l.attach(l.web, harness.HostPort())
	l.attach(l.client, nil)
	for pod, address := range map[*sandbox.Pod]string{l.web: "[::]:80", l.client: "[::]:80", l.outside: "[::]:80", nil: "[::]:7000"} {
		server, err := harness.Speak(pod, address)
		kerneltest.Must(l, err)
		l.Cleanup(func() { _ = server.Close() })
	}
}

func (l *lab) attach(pod *sandbox.Pod, caps map[string]any) {
	l.Helper()
	_, err := l.tryAttach(pod, caps)
	kerneltest.Must(l, err)
}

func (l *lab) tryAttach(pod *sandbox.Pod, caps map[string]any) (types.Result, error) {
	rt := harness.Named(pod, caps)
	l.Cleanup(func() { l.network.Must(l, "DEL", rt) })
	return l.network.Do("ADD", rt, nil)
}

// A path is a connection between two machines.
type path struct {
	name          string
	from          *sandbox.Pod
	address, want string
}

// paths returns the connections of pods and of Docker's container.
func (l *lab) paths() (list []path) {
	for _, f := range []struct{ family, option, node, outside, loopback string }{
		{"IPv4", "-4", "192.0.2.1", "192.0.2.2", "127.0.0.1"}, {"IPv6", "-6", "2001:db8::1", "2001:db8::2", ""},
	} {
		add := func(name string, from *sandbox.Pod, host, port string, to string) {
			list = append(list, path{name + ", " + f.family, from, net.JoinHostPort(host, port), to})
		}
		add("pod to pod", l.client, harness.AddressOf(l.T, l.web, f.option), "80", "web")
		add("pod to outside", l.client, f.outside, "80", "outside")
		add("pod to node", l.client, f.node, "7000", "host")
		add("node to pod", nil, harness.AddressOf(l.T, l.web, f.option), "80", "web")
		add("outside to hostPort", l.outside, f.node, "8080", "web")
		add("pod to hostPort", l.client, f.node, "8080", "web")
		add("node to hostPort", nil, f.node, "8080", "web")
		if f.loopback == "" {
			continue
		}
		add("node to hostPort at 127.0.0.1", nil, f.loopback, "8080", "web")
		if l.docker {
			add("outside to Docker's port", l.outside, f.node, "8090", "docker")
			add("node to Docker's port", nil, f.node, "8090", "docker")
			add("pod to Docker's port", l.client, f.node, "8090", "docker")
		}
	}
	return list
}

// fails compares the connections that fail with the wanted ones. A wanted name without a family stands for both.
func (l *lab) fails(when string, want ...string) {
	l.Helper()
	var wanted []string
	for _, p := range l.paths() {
		if p.among(want) {
			wanted = append(wanted, p.name)
		}
	}
	if diff := cmp.Diff(wanted, l.failing(15*time.Second, want)); diff != "" {
		l.Errorf("%s: what fails (-want +got):\n%s", when, diff)
	}
}

// failing returns the names of the connections that fail. Those that should not are tried again for a while, because a container may still
// be starting.
func (l *lab) failing(patience time.Duration, want []string) (names []string) {
	l.Helper()
	paths := l.paths()
	failed := make([]bool, len(paths))
	var wait sync.WaitGroup
	for i, p := range paths {
		wait.Go(func() {
			limit := min(harness.Patience(p.among(want)), 3*time.Second) // a repeated packet of one connection keeps its old translation
			for end := time.Now().Add(patience); !failed[i]; time.Sleep(20 * time.Millisecond) {
				if got, err := harness.Dial(p.from, p.address, limit); err == nil && got == p.want {
					return
				}
				failed[i] = p.among(want) || time.Now().After(end)
			}
		})
	}
	wait.Wait()
	for i, p := range paths {
		if failed[i] {
			names = append(names, p.name)
		}
	}
	return names
}

// among reports whether the path's name is in a list, with or without its family.
func (p path) among(names []string) bool {
	name, _, _ := strings.Cut(p.name, ",")
	return slices.Contains(names, p.name) || slices.Contains(names, name)
}

// podlace runs a command of podlace, and returns its output.
func (l *lab) podlace(command string) string {
	l.Helper()
	return harness.Shell(l, filepath.Join(harness.BinDir(), "podlace")+" "+command)
}

// advice returns the commands that doctor prints for the checks of firewalls.
func (l *lab) advice() (commands []string) {
	l.Helper()
	var found []struct{ Level, Command string }
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "doctor", "forward-policy", "firewall-reload", "-o", "json").Output()
	if len(out) == 0 {
		kerneltest.Must(l, err)
	}
	kerneltest.Must(l, json.Unmarshal(out, &found))
	for _, f := range found {
		if f.Level == "error" || f.Level == "warning" {
			commands = append(commands, f.Command)
		}
	}
	return commands
}

// documented returns the lines of a page that begin with a command, and fails the test if there are none.
func documented(t *testing.T, command string) (lines []string) {
	t.Helper()
	page, err := os.ReadFile("../../../docs/TROUBLESHOOTING.md")
	kerneltest.Must(t, err)
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, command+" ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if len(lines) == 0 {
		t.Fatalf("TROUBLESHOOTING.md has no command %s", command)
	}
	return lines
}

// A daemon is a program that runs until the end of the test, and that can be restarted as a service manager does it.
type daemon struct {
	*testing.T
	line  []string
	ready string // a command line that succeeds when the daemon is ready
	log   string
	cmd   *exec.Cmd
}

func (l *lab) startDaemon(ready string, line ...string) *daemon {
	l.Helper()
	d := &daemon{T: l.T, line: line, ready: ready, log: filepath.Join(l.TempDir(), filepath.Base(line[0])+".log")}
	l.Cleanup(func() {
		if d.cmd != nil {
			d.stop()
		}
		if l.Failed() {
			text, _ := os.ReadFile(d.log)
			l.Logf("the end of %s:\n%s", d.log, text[max(0, len(text)-3000):])
		}
	})
	d.start()
	return d
}

func (d *daemon) start() {
	d.Helper()
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	kerneltest.Must(d, err)
	defer log.Close()
	d.cmd = exec.Command(d.line[0], d.line[1:]...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	kerneltest.Must(d, d.cmd.Start())
	harness.Await(d, strings.Join(d.line, " "), func() bool { return exec.Command("sh", "-c", d.ready).Run() == nil })
}

func (d *daemon) stop() {
	d.Helper()
	kerneltest.Must(d, d.cmd.Process.Signal(syscall.SIGTERM))
	ended := time.AfterFunc(harness.CallLimit, func() { _ = d.cmd.Process.Kill() })
	_ = d.cmd.Wait()
	if d.cmd = nil; !ended.Stop() {
		d.Fatalf("%s does not end", d.line[0])
	}
}

func (d *daemon) restart() {
	d.Helper()
	d.stop()
	d.start()
}

// startFirewalld starts firewalld with one of its backends. Every test begins with its shipped configuration.
func (l *lab) startFirewalld(backend string) *daemon {
	l.Helper()
	harness.Shell(l, fmt.Sprintf("sed -i 's/^FirewallBackend=.*/FirewallBackend=%s/' /etc/firewalld/firewalld.conf", backend))
	return l.startDaemon("firewall-cmd --state", "firewalld", "--nofork", "--nopid")
}

// startDocker starts Docker.
func (l *lab) startDocker(args ...string) *daemon {
	l.Helper()
	return l.startDaemon("docker version && ! docker ps -a --format '{{.State}}' | grep -v running", append([]string{"dockerd", "--storage-driver", "vfs"}, args...)...)
}

// publish runs a container whose server answers at a port of the node.
func (l *lab) publish(port int) error {
	out, err := exec.Command("sh", "-ec", fmt.Sprintf(`
		if ! docker image inspect podlace.test/busybox >/dev/null 2>&1; then
			folder=$(mktemp -d)
			mkdir "$folder/bin"
			cp "$(command -v busybox)" "$folder/bin/"
			tar -C "$folder" -c bin | docker import - podlace.test/busybox
			rm -r "$folder"
		fi
		docker run -d --stop-signal KILL --restart always --name web-%[1]d -p %[1]d:80 podlace.test/busybox \
			/bin/busybox nc -ll -p 80 -e /bin/busybox printf docker`, port)).CombinedOutput()
	l.Cleanup(func() { harness.Shell(l, fmt.Sprintf("docker rm -f web-%d", port)) })
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}
