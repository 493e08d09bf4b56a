// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

type object = kerneltest.Object

// testLab is a node with the network "net", whose first range set has 5 addresses.
type testLab struct {
	*testing.T
	confDir string
	log     *strings.Builder
	*Collector
}

func config(name string) []byte {
	text, _ := json.Marshal(object{"cniVersion": "1.1.0", "name": name, "plugins": []object{
		{"type": "bridge", "bridge": "pm0", "isGateway": true, "ipam": object{"type": "host-local", "ranges": [][]object{
			{{"subnet": "10.91.0.0/29"}}, {{"subnet": "fd00:91::/64"}}}}},
		{"type": "portmap"},
		{"type": "bandwidth"}}})
	return text
}

func newLab(t *testing.T) testLab {
	t.Helper()
	kerneltest.EmptyNFT(t)
	l := testLab{T: t, confDir: t.TempDir(), log: &strings.Builder{}}
	l.Collector = New(l.confDir, slog.New(slog.NewTextHandler(l.log, nil)))
	l.keepFor = 0
	kerneltest.Must(t, os.WriteFile(filepath.Join(l.confDir, "10-net.conflist"), config("net"), 0o644))
	t.Cleanup(func() {
		if link, err := netlink.LinkByName("pm0"); err == nil {
			kerneltest.Must(t, netlink.LinkDel(link))
		}
		kerneltest.Must(t, os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni"))
	})
	return l
}

// callPlugins runs the plugins of the network for a pod, as a runtime does.
func (l testLab) callPlugins(verb string, pod *sandbox.Pod, id string, runtime object) {
	l.Helper()
	var list struct{ Plugins []object }
	kerneltest.Must(l, json.Unmarshal(config("net"), &list))
	plugins := []func(func(string) string, io.Reader, io.Writer, io.Writer) int{
		bridge.Plugin(hostlocal.Plugin()).Run, portmap.Plugin().Run, bandwidth.Plugin().Run}
	var prev any
	for i := range plugins {
		if verb == "DEL" {
			i = len(plugins) - 1 - i
		}
		conf := list.Plugins[i].With("name", "net", "cniVersion", "1.1.0", "runtimeConfig", runtime, "prevResult", prev)
		one := kerneltest.Lab{T: l.T, Plugin: plugins[i], Conf: conf, Pod: pod}
		out := one.OK(one.Call(verb, id))
		if verb == "ADD" {
			kerneltest.Must(l, json.Unmarshal(out.Stdout, &prev))
		}
	}
}

// scrape returns the values that the collector serves, without the time that it needed.
func (l testLab) scrape() map[string]float64 {
	l.Helper()
	registry := prometheus.NewPedanticRegistry()
	kerneltest.Must(l, registry.Register(l.Collector))
	families, err := registry.Gather()
	kerneltest.Must(l, err)
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, label := range m.GetLabel() {
				labels = append(labels, label.GetName()+"="+label.GetValue())
			}
			if f.GetName() != string(duration) {
				got[strings.TrimPrefix(f.GetName(), "podlace_")+"{"+strings.Join(labels, ",")+"}"] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return got
}

// valuesBefore returns the values before the first pod, with `changes` in place of the same series.
func valuesBefore(changes map[string]float64) map[string]float64 {
	want := map[string]float64{"attachments{network=net}": 0, "orphaned_attachments{network=net}": 0, "unreadable_records{network=net}": 0,
		"hostports{protocol=tcp}": 0, "hostports{protocol=udp}": 0, "hostports{protocol=sctp}": 0,
		"ipam_addresses{family=ipv4,network=net,set=0,state=leased}": 0, "ipam_addresses{family=ipv4,network=net,set=0,state=free}": 5,
		"ipam_addresses{family=ipv6,network=net,set=1,state=leased}": 0,
		"ipam_addresses{family=ipv6,network=net,set=1,state=free}":   1<<64 - 2}
	for _, source := range sources() {
		want["node_collector_success{collector="+source+"}"] = 1
	}
	for _, direction := range []string{ingress, egress} {
		for _, m := range []string{"limits", "limit_bytes_per_second", "missing_limits", "backlog_bytes", "sent_bytes_total",
			"dropped_packets_total"} {
			want[fmt.Sprintf("bandwidth_%s{direction=%s,network=net}", m, direction)] = 0
		}
	}
	for series, value := range changes {
		want[series] = value
	}
	return want
}

// wantValues compares the current values with those before the first pod and their expected changes. The values named in vary are left out,
// because the kernel's own traffic changes them.
func (l testLab) wantValues(when string, changes map[string]float64, vary ...string) {
	l.Helper()
	want, got := valuesBefore(changes), l.scrape()
	for _, name := range vary {
		for _, direction := range []string{ingress, egress} {
			series := fmt.Sprintf("%s{direction=%s,network=net}", name, direction)
			if _, ok := got[series]; !ok {
				l.Errorf("%s: %s is missing", when, series)
			}
			delete(want, series)
			delete(got, series)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		l.Errorf("%s:\n%s\n%s", when, diff, l.log)
	}
}

// TestLife compares each value while real plugins attach and detach pods.
func TestLife(t *testing.T) {
	l := newLab(t)
	l.wantValues("without pods", nil)
	web, db := kerneltest.NewPod(t), kerneltest.NewPod(t)
	l.callPlugins("ADD", web, "web", object{"bandwidth": object{"ingressRate": 8e6, "egressRate": 16e6}, "portMappings": []object{
		{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}, {"hostPort": 53, "containerPort": 53, "protocol": "udp"}}})
	l.callPlugins("ADD", db, "db", object{"bandwidth": object{"ingressRate": 4e6}})
	attached := map[string]float64{"attachments{network=net}": 2, "hostports{protocol=tcp}": 1, "hostports{protocol=udp}": 1,
		"ipam_addresses{family=ipv4,network=net,set=0,state=leased}": 2, "ipam_addresses{family=ipv4,network=net,set=0,state=free}": 3,
		"ipam_addresses{family=ipv6,network=net,set=1,state=leased}": 2, "ipam_addresses{family=ipv6,network=net,set=1,state=free}": 1<<64 - 4,
		"bandwidth_limits{direction=ingress,network=net}": 2, "bandwidth_limit_bytes_per_second{direction=ingress,network=net}": 1.5e6,
		"bandwidth_limits{direction=egress,network=net}": 1, "bandwidth_limit_bytes_per_second{direction=egress,network=net}": 2e6}
	vary := []string{"bandwidth_sent_bytes_total", "bandwidth_backlog_bytes"}
	l.wantValues("with two pods", attached, vary...)

	link, err := netlink.LinkByName(attachment.Key{Network: "net", ContainerID: "db", IfName: "eth0"}.HostVeth())
	kerneltest.Must(t, err)
	qdiscs, err := netlink.QdiscList(link)
	kerneltest.Must(t, err)
	for _, q := range qdiscs {
		if q.Type() == "tbf" {
			kerneltest.Must(t, netlink.QdiscDel(q))
		}
	}
	attached["bandwidth_missing_limits{direction=ingress,network=net}"] = 1
	l.wantValues("after another program removed a limit", attached, vary...)

	kerneltest.Must(t, os.WriteFile(filepath.Join(store.Root, "net", "bridge-0123456789abcdef"), []byte("{"), 0o600))
	attached["unreadable_records{network=net}"] = 1
	l.wantValues("with a torn record", attached, vary...)

	kerneltest.Must(t, db.Close())
	attached["orphaned_attachments{network=net}"] = 1
	attached["bandwidth_missing_limits{direction=ingress,network=net}"] = 0
	attached["bandwidth_limits{direction=ingress,network=net}"] = 1
	attached["bandwidth_limit_bytes_per_second{direction=ingress,network=net}"] = 1e6
	l.wantValues("after a namespace has gone without DEL", attached, vary...)
	for _, id := range []string{"web", "db"} {
		l.callPlugins("DEL", web, id, nil)
	}
	l.wantValues("after DEL", map[string]float64{"unreadable_records{network=net}": 1}, vary...)
}

// TestSums: the counters of bandwidth limits start at zero and count what the kernel sends and drops. They stay when a pod ends.
func TestSums(t *testing.T) {
	l := newLab(t)
	pod := kerneltest.NewPod(t)
	l.callPlugins("ADD", pod, "a", object{"bandwidth": object{"ingressRate": 8000, "ingressBurst": 8 * 5000}})
	value := func(name string) float64 { return l.scrape()["bandwidth_"+name+"{direction=ingress,network=net}"] }
	veth := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.HostVeth()
	kerneltest.Must(t, kerneltest.Flood(veth, 3))
	if got := value("sent_bytes_total"); got != 0 {
		t.Errorf("the first reading counts %v bytes: a restart of the agent would look like traffic", got)
	}
	before := value("sent_bytes_total")
	kerneltest.Must(t, kerneltest.Flood(veth, 20_000)) // more packets than any queue has
	if got := value("dropped_packets_total"); got < 1000 {
		t.Errorf("%v packets were dropped of 20,000", got)
	}
	if got := value("sent_bytes_total"); got <= before {
		t.Errorf("%v bytes, before %v", got, before)
	}
	if got := value("backlog_bytes"); got < 1134 {
		t.Errorf("%v bytes wait", got)
	}
	sum := value("dropped_packets_total")
	// The bridge's own IPv6 multicast also goes into the full queue, so a few more may be dropped between two readings.
	if got := value("dropped_packets_total"); got < sum || got > sum+100 {
		t.Errorf("%v dropped packets, a moment before %v", got, sum)
	}
	l.callPlugins("DEL", pod, "a", nil)
	if got := value("dropped_packets_total"); got < sum {
		t.Errorf("%v packets after the pod, before %v: rate() takes this for a restart", got, sum)
	}
	if got := value("backlog_bytes"); got != 0 {
		t.Errorf("%v bytes wait for no pod", got)
	}
	sum = value("sent_bytes_total")
	l.callPlugins("ADD", pod, "b", object{"bandwidth": object{"ingressRate": 8000, "ingressBurst": 8 * 5000}})
	kerneltest.Must(t, kerneltest.Flood(attachment.Key{Network: "net", ContainerID: "b", IfName: "eth0"}.HostVeth(), 3))
	if got := value("sent_bytes_total"); got < sum+3*1134 {
		t.Errorf("%v bytes after 3 frames of a new pod, before %v", got, sum)
	}
	l.callPlugins("DEL", pod, "b", nil)
}

// TestEgressSums: what a pod sends counts for its egress limit.
func TestEgressSums(t *testing.T) {
	l := newLab(t)
	pod := kerneltest.NewPod(t)
	l.callPlugins("ADD", pod, "a", object{"bandwidth": object{"egressRate": 8e6}})
	sent := func() float64 { return l.scrape()["bandwidth_sent_bytes_total{direction=egress,network=net}"] }
	before := sent()
	kerneltest.Must(t, pod.Do(func() error { return kerneltest.Flood("eth0", 3) }))
	harness.Await(t, "the bytes of 3 frames", func() bool { return sent() >= before+3*1134 })
	l.callPlugins("DEL", pod, "a", nil)
}

// TestInvisible: a network namespace whose folder this container does not see does not count as gone.
func TestInvisible(t *testing.T) {
	l := newLab(t)
	att, err := attachment.Open(&plugin.Request{Plugin: "bridge", Network: "net", ContainerID: "a", IfName: "eth0",
		NetnsPath: "/nowhere/netns/a", Log: slog.Default()})
	kerneltest.Must(t, err, att.Save(object{}))
	att.Close()
	l.wantValues("with an invisible namespace", map[string]float64{"attachments{network=net}": 1})
}

// TestOneSourceFails: only the metrics of an unreadable source are missing, and the error is logged once.
func TestOneSourceFails(t *testing.T) {
	l := newLab(t)
	path := filepath.Join(l.confDir, "20-bad.conflist")
	kerneltest.Must(t, os.WriteFile(path, []byte(strings.Replace(string(config("bad")), "10.91.0.0/29", "10.91.0.1/29", 1)), 0o644))
	for range 2 {
		got := l.scrape()
		if got["node_collector_success{collector=addresses}"] != 0 || got["node_collector_success{collector=bandwidth}"] != 1 {
			t.Errorf("%v", got)
		}
		if _, ok := got["ipam_addresses{family=ipv4,network=net,set=0,state=free}"]; !ok {
			t.Error("the other network is missing")
		}
	}
	if n := strings.Count(l.log.String(), "network bad: "); n != 1 {
		t.Errorf("%d log lines: %s", n, l.log)
	}
	kerneltest.Must(t, os.Remove(path))
	l.wantValues("when the file is gone", nil)
}

// TestHang: if the reading never ends, a scrape waits only until the timeout, and no second reading starts.
func TestHang(t *testing.T) {
	l := newLab(t)
	l.timeout = 10 * time.Millisecond
	free, readings := make(chan struct{}), 0
	l.read = func() metricValues {
		readings++
		<-free
		return metricValues{}
	}
	for range 3 {
		if got := l.scrape(); len(got) != 3 || got["node_collector_success{collector=records}"] != 0 {
			t.Errorf("%v", got)
		}
	}
	l.keepFor = time.Hour
	close(free)
	kerneltest.Await(t, "the values of the reading", func() bool { return len(l.scrape()) == 0 })
	l.scrape()
	if readings != 1 {
		t.Errorf("%d readings", readings)
	}
}

// TestNames: the names follow Prometheus' rules, and a folder with an unusual name causes no error.
func TestNames(t *testing.T) {
	l := newLab(t)
	kerneltest.Must(t, os.MkdirAll(filepath.Join(store.Root, "\xff"), 0o700))
	kerneltest.Must(t, os.WriteFile(filepath.Join(store.Root, "\xff", "bridge-0123456789abcdef"), nil, 0o600))
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(l.Collector)
	families, err := registry.Gather()
	kerneltest.Must(t, err)
	if len(families) != len(metrics()) {
		t.Errorf("%d metrics are served, %d described", len(families), len(metrics()))
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Error(errors.Join(err, fmt.Errorf("%v", problems)))
	}
}

// BenchmarkScrape measures a reading on a node with 250 pods that have bandwidth limits.
func BenchmarkScrape(b *testing.B) {
	for i := range 250 {
		att, err := attachment.Open(&plugin.Request{Plugin: "bandwidth", Network: "net", ContainerID: fmt.Sprint("c", i), IfName: "eth0",
			NetnsPath: "/proc/self/ns/net", Log: slog.Default()})
		kerneltest.Must(b, err, att.Save(object{"link": "lo", "index": 1, "ingress": object{"rate": 1000}}))
		att.Close()
	}
	b.Cleanup(func() { os.RemoveAll(store.Root) })
	c := New(b.TempDir(), slog.New(slog.DiscardHandler))
	for b.Loop() {
		c.readAll()
	}
}
