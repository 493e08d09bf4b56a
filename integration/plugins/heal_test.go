// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// healLab is a node with pods that have hostPorts and limits, and a running `podlace reload --watch`.
type healLab struct {
	*testing.T
	n    *harness.Network
	pods []*sandbox.Pod
	rts  []*libcni.RuntimeConf
	log  string
	pid  int // of `podlace reload --watch`
}

func newHealLab(t *testing.T, pods int) *healLab {
	harness.Program(t, "nft")
	harness.Need(t, "podlace", "bridge", "host-local", "portmap", "bandwidth")
	n, err := harness.OpenNetwork(harness.Encode(object{"cniVersion": "1.1.0", "name": "heal", "plugins": []any{
		object{"type": "bridge", "bridge": "heal0", "isGateway": true, "hairpinMode": true, "ipMasq": true, "antiSpoof": true,
			"ipam": object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.72.0.0/16"}}, []any{object{"subnet": "fd72::/64"}}},
				"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}}},
		object{"type": "portmap", "snat": true, "backend": "nftables", "capabilities": object{"portMappings": true}},
		object{"type": "bandwidth", "capabilities": object{"bandwidth": true}},
	}}), t.TempDir(), nil)
	kerneltest.Must(t, err)
	l := &healLab{T: t, n: n, log: filepath.Join(t.TempDir(), "log")}
	for i := range pods {
		caps := harness.Capabilities()
		caps["portMappings"] = []any{harness.Port(20000+i, 80, "tcp")}
		pod := harness.NewPod(t, fmt.Sprint("heal", i))
		rt := harness.Named(pod, caps)
		l.pods, l.rts = append(l.pods, pod), append(l.rts, rt)
		n.Must(t, "ADD", rt)
	}
	t.Cleanup(func() {
		for _, rt := range l.rts {
			n.Must(t, "DEL", rt)
		}
		harness.Shell(t, "ip link del heal0")
	})
	return l
}

// watch starts `podlace reload --watch` and waits for its first comparison.
func (l *healLab) watch() (stop func()) {
	l.Helper()
	f, err := os.Create(l.log)
	kerneltest.Must(l, err)
	cmd := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "reload", "--watch")
	cmd.Stderr = f
	kerneltest.Must(l, cmd.Start())
	l.Cleanup(func() { _ = cmd.Process.Kill() }) // after a failure
	l.await("watching", func() bool { return strings.Contains(l.logged(), "watching") })
	time.Sleep(1100 * time.Millisecond) // it compares at most once a second
	l.pid = cmd.Process.Pid
	return func() {
		l.Helper()
		kerneltest.Must(l, cmd.Process.Signal(os.Interrupt), cmd.Wait(), f.Close())
		l.Logf("%v of CPU\n%s", cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime(), l.logged())
	}
}

// cost returns the watcher's milliseconds of CPU and its wake-ups so far (schedstat and status in proc(5)).
func (l *healLab) cost() (sum [2]int) {
	l.Helper()
	for i, word := range strings.Fields(harness.Shell(l.T, fmt.Sprintf(`cd /proc/%d/task; cat */schedstat | awk '{ ns += $1 } END { print int(ns / 1e6) }'
		grep -h ^voluntary */status | awk '{ n += $2 } END { print n }'`, l.pid))) {
		n, err := strconv.Atoi(word)
		kerneltest.Must(l, err)
		sum[i] = n
	}
	return sum
}

func (l *healLab) logged() string {
	text, err := os.ReadFile(l.log)
	kerneltest.Must(l, err)
	return string(text)
}

func (l *healLab) await(what string, so func() bool) time.Duration {
	l.Helper()
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if so() {
			return time.Since(began)
		}
		if time.Since(began) > 30*time.Second {
			l.Fatalf("not %s after 30 s; log:\n%s", what, l.logged())
		}
	}
}

// state returns what a flush can remove, without counters and handles.
func (l *healLab) state() string {
	return harness.Shell(l.T, `{ nft -s list ruleset; tc qdisc show | grep -v noqueue; ip -br link; ip -br addr show dev heal0; ip route; ip -6 route
for l in $(ls /sys/class/net | grep ^veth); do tc filter show dev $l ingress; bridge -d link show dev $l | sed 's/^[0-9]*//'; done
sysctl net.ipv4.ip_forward net.ipv6.conf.all.forwarding; } | sed -E '/^bwp/s/ ..(:..){5} / /; /index [0-9]+ ref/d; s/@[^: ]+//' | sort`)
}

// TestHeal: what another program removes comes back without a call of the runtime, and an established connection survives.
func TestHeal(t *testing.T) {
	l := newHealLab(t, 20)
	conn := l.connect(l.pods[1], "10.72.0.1:20000", l.pods[0])
	for _, c := range []struct{ what, command string }{
		{"ruleset", "nft flush ruleset"},
		{"one table", "nft delete table bridge podlace_guard"},
		{"elements", "nft flush map inet podlace_hostport ports4"},
		{"qdiscs", "for l in $(ls /sys/class/net | grep ^veth); do tc qdisc del dev $l root; tc qdisc del dev $l clsact; done"},
		{"an ifb", "ip link del $(ls /sys/class/net | grep ^bwp | head -n 1)"},
		{"address", "ip addr flush dev heal0 scope global"},
		{"bridge down", "ip link set heal0 down"},
		{"bridge deleted", "ip link del heal0"},
		{"port detached", "ip link set $(ls /sys/class/net | grep ^veth | head -n 1) nomaster"},
		{"route", "ip route del 10.72.0.0/16"},
		{"IPv6 route", "ip -6 route del fd72::/64 dev heal0"},
		{"forwarding", "sysctl -q net.ipv4.ip_forward=0"},
		{"IPv6 forwarding", "sysctl -q net.ipv6.conf.all.forwarding=0"},
	} {
		want, stop := l.state(), l.watch()
		harness.Shell(t, c.command)
		got, began := "", time.Now()
		took := l.await("restored after "+c.command, func() bool { got = l.state(); return got == want || time.Since(began) > 20*time.Second })
		if got != want {
			t.Fatalf("%s: not restored: %s\n%s", c.what, cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")), l.logged())
		}
		l.await("logged", func() bool { return strings.Contains(l.logged(), "restored what was removed") })
		t.Logf("%-16s restored in %v", c.what, took.Round(time.Millisecond))
		conn.echo(c.what)
		stop()
	}
	for _, rt := range l.rts {
		l.n.Must(t, "CHECK", rt)
	}
}

type echoConn struct {
	*healLab
	c net.Conn
	r *bufio.Reader
}

// connect opens a connection from a pod to a hostPort, behind which another pod answers each line with the same. It sends no keepalives:
// while the node has no NAT rule at all, the kernel does not translate packets, and the node refuses them.
func (l *healLab) connect(from *sandbox.Pod, address string, to *sandbox.Pod) echoConn {
	l.Helper()
	var listener net.Listener
	quietly := net.ListenConfig{KeepAlive: -1}
	kerneltest.Must(l, harness.Networked(to, func() (err error) {
		listener, err = quietly.Listen(l.Context(), "tcp", ":80")
		return err
	}))
	l.Cleanup(func() { listener.Close() })
	go func() {
		if c, err := listener.Accept(); err == nil {
			_, _ = io.Copy(c, c)
		}
	}()
	var c net.Conn
	kerneltest.Must(l, harness.Networked(from, func() (err error) {
		c, err = (&net.Dialer{KeepAlive: -1}).Dial("tcp", address)
		return err
	}))
	l.Cleanup(func() { c.Close() })
	return echoConn{l, c, bufio.NewReader(c)}
}

func (e echoConn) echo(after string) {
	e.Helper()
	_ = e.c.SetDeadline(time.Now().Add(10 * time.Second))
	_, err := fmt.Fprintln(e.c, after)
	if got, readErr := e.r.ReadString('\n'); err != nil || readErr != nil || got != after+"\n" {
		e.Errorf("the connection broke after %s: %v, %v, %q", after, err, readErr, got)
	}
}

// TestHealFight: a program that flushes for ever leads to one message after the first repairs, and to less and less work.
func TestHealFight(t *testing.T) {
	l := newHealLab(t, 2)
	defer l.watch()()
	stop := time.Now().Add(20 * time.Second)
	for time.Now().Before(stop) {
		harness.Shell(t, "nft flush ruleset")
		time.Sleep(300 * time.Millisecond)
	}
	log := l.logged()
	if strings.Count(log, "another program keeps removing") != 1 || strings.Count(log, "\n") > 8 || !strings.Contains(log, "by nft") {
		t.Errorf("log:\n%s", log)
	}
	want := "podlace_hostport"
	l.await("restored in the end", func() bool { return strings.Contains(l.state(), want) })
}

// TestMeasuredHeal: after a flush of everything, the watcher restores all pods. HEAL_PODS sets their number, HEAL_CURVE a file for a
// picture of the time that it takes, and HEAL_IDLE how long the watcher then has nothing to do, such as 1h.
func TestMeasuredHeal(t *testing.T) {
	pods, _ := strconv.Atoi(os.Getenv("HEAL_PODS"))
	l := newHealLab(t, max(pods, 50))
	conn := l.connect(l.pods[1], "10.72.0.1:20000", l.pods[0])
	want := l.state()
	flush := func() time.Time {
		harness.Shell(t, `nft flush ruleset; ip -force -batch - <<-END
		link del heal0
		END
		ls /sys/class/net | sed -nE '/^(veth|bwp)/s/.*/qdisc del dev & root/p; s/^(qdisc del dev veth.*) root/\1 clsact/p' | tc -batch -
		sysctl -q net.ipv4.ip_forward=0`)
		return time.Now()
	}
	began := flush()
	harness.Shell(t, filepath.Join(harness.BinDir(), "podlace")+" reload")
	byHand := time.Since(began)
	if got := l.state(); got != want {
		t.Errorf("podlace reload: %s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
	}
	stop := l.watch()
	time.Sleep(5 * time.Second)
	began = flush()
	l.await("restored", func() bool { return strings.Contains(l.logged(), "restored what was removed") })
	watched := time.Since(began)
	time.Sleep(5 * time.Second)
	if got := l.state(); got != want {
		t.Errorf("watched: %s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
	}
	conn.echo("a flush of everything")
	samples := l.curve(flush())
	if file := os.Getenv("HEAL_CURVE"); file != "" {
		kerneltest.Must(t, os.WriteFile(file, []byte(drawCurve(samples, len(l.pods), byHand)), 0o644))
	}
	if idle, _ := time.ParseDuration(os.Getenv("HEAL_IDLE")); idle > 0 {
		before := l.cost()
		time.Sleep(idle)
		after := l.cost()
		t.Logf("figures: in %v without an event %d ms of CPU, %d wake-ups", idle, after[0]-before[0], after[1]-before[1])
	}
	stop()
	t.Logf("figures: %d pods restored %v after the flush, by podlace reload in %v: %.2f of it", len(l.pods), watched, byHand,
		watched.Seconds()/byHand.Seconds())
}
