// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

// scrape returns the metrics as text, and as a map from series (name with labels) to value.
func (l *lab) scrape() (text string, series map[string]float64) {
	l.Helper()
	path := strings.TrimPrefix(l.HTTP, "unix:")
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}}}
	answer, err := client.Get("http://node/metrics")
	kerneltest.Must(l, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	kerneltest.Must(l, err)
	series = map[string]float64{}
	for line := range strings.Lines(string(body)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok || !strings.HasPrefix(line, "#") {
			if !ok {
				name, value, _ = strings.Cut(strings.TrimSpace(line), " ")
			} else {
				name += "}"
			}
			series[strings.TrimPrefix(name, "podlace_node_")], _ = strconv.ParseFloat(value, 64)
		}
	}
	return string(body), series
}

func (l *lab) awaitMetrics(when string, want map[string]float64) {
	l.Helper()
	var differs []string
	for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		_, series := l.scrape()
		differs = nil
		for name, value := range want {
			if got, ok := series[name]; !ok || got != value {
				differs = append(differs, fmt.Sprintf("%s is %v (%t), want %v", name, got, ok, value))
			}
		}
		if len(differs) == 0 {
			return
		}
	}
	l.Fatalf("%s: %s", when, strings.Join(differs, "; "))
}

// repairs removes something until the agent, which brings it back each time by one change of the kind, counts its removal in the series. An
// event of another kind just before a removal can be the cause that is counted instead.
func (l *lab) repairs(kind string, remove func() error, series string) {
	l.Helper()
	changes := func() (n float64) {
		_, all := l.scrape()
		for name, value := range all {
			if strings.HasPrefix(name, "changes_total{") && strings.Contains(name, fmt.Sprintf("kind=%q", kind)) {
				n += value
			}
		}
		return n
	}
	for range 5 {
		before := changes()
		kerneltest.Must(l, remove())
		l.await("the "+kind+" is back, by one change", func() bool { return changes() == before+1 })
		if _, now := l.scrape(); now[series] == 1 {
			return
		}
	}
	l.Errorf("%s is not counted as its cause", series)
}

// TestMetrics compares each metric with its expected value after events that must change it.
func TestMetrics(t *testing.T) {
	l := newLab(t)
	l.HTTP = "unix:" + l.dir + "/http"
	younger := nodeObject("n8", []string{"10.244.2.0/24"}, []string{"192.0.2.8"})
	younger.CreationTimestamp.Time = time.Unix(2_000_000, 0)
	l.api.put(younger)
	l.ready()
	l.awaitMetrics("at the start", map[string]float64{`peers{state="direct"}`: 4, `peers{state="refused"}`: 1, `peers{state="conflict"}`: 1,
		`peers{state="vxlan"}`: 0, `peers{state="fabric"}`: 0, `peers{state="failed"}`: 0, `routes{family="ipv4"}`: 3, `routes{family="ipv6"}`: 3,
		"ready": 1, "mtu": 1500, "problems": 2, "deletions_held": 0, "config_refused": 0, "kernel_removals_total": 0,
		`podlace_attachments{network="podlace"}`: 0, `podlace_hostports{protocol="tcp"}`: 0, `collector_success{collector="records"}`: 1,
		`collector_success{collector="addresses"}`: 1, `collector_success{collector="bandwidth"}`: 1,
		"route_lag_seconds_count": 1, `changes_total{cause="start",kind="binary"}`: 7})
	_, first := l.scrape()
	for _, kind := range []string{"route", "node", "conflist"} { // the list of nodes arrives with the first step or later
		got := first[fmt.Sprintf(`changes_total{cause="api",kind=%q}`, kind)] + first[fmt.Sprintf(`changes_total{cause="start",kind=%q}`, kind)]
		if want := map[string]float64{"route": 10, "node": 1, "conflist": 1}[kind]; got != want {
			t.Errorf("%v changes of kind %s, want %v", got, kind, want)
		}
	}
	// watch_age_seconds grows without events, and an event resets it.
	age := func() float64 { _, series := l.scrape(); return series["watch_age_seconds"] }
	old := age()
	l.await("the age grows", func() bool { return age() > old+0.1 })
	old = age()
	l.api.put(l.peer(2))
	l.await("an event ends it", func() bool { return age() < old })

	l.repairs("route", func() error {
		return netlink.RouteDel(&netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.3.0/24"))})
	}, "kernel_removals_total")
	l.awaitMetrics("a route was removed", map[string]float64{"kernel_removals_total": 1, `routes{family="ipv4"}`: 3})
	if _, now := l.scrape(); first["sync_seconds_count"] < 1 || now["sync_seconds_count"] <= first["sync_seconds_count"] {
		t.Errorf("%v comparisons, %v after one more", first["sync_seconds_count"], now["sync_seconds_count"])
	}
	l.repairs("conflist", func() error { return os.Remove(l.dir + "/net.d/" + conflistName) }, `changes_total{cause="files",kind="conflist"}`)
	l.repairs("binary", func() error { return os.Remove(l.dir + "/bin/podlace-bridge") }, `changes_total{cause="files",kind="binary"}`)
	config := l.read("config/config.json")
	l.put("config/config.json", "{")
	l.awaitMetrics("a wrong configuration", map[string]float64{"config_refused": 1, "ready": 1, "problems": 3})
	l.put("config/config.json", strings.Replace(config, "{", `{"offLink": "fabric", "mtu": 1400, `, 1))
	l.awaitMetrics("another configuration", map[string]float64{"config_refused": 0, "mtu": 1400, `peers{state="fabric"}`: 1,
		`peers{state="refused"}`: 0, "problems": 1})
	for _, name := range []string{"n8", "n3", "n2"} {
		l.api.remove(name, true)
	}
	l.api.hangUp(true)
	l.awaitMetrics("a suspicious list", map[string]float64{"deletions_held": 1, `peers{state="direct"}`: 0, `routes{family="ipv4"}`: 3,
		`routes{family="ipv6"}`: 3})
	l.put("net.d/05-other.conflist", "{}")
	l.awaitMetrics("another network", map[string]float64{"ready": 0})
}

// shippedConflist is the conflist for clusters, which has all plugins with metrics.
const shippedConflist = "../../../conf/cluster/base/" + conflistName

// TestMetricsNamed: docs/OPERATING.md, the list in integration/monitoring and the endpoint have the same metrics and labels, with names as
// Prometheus wants them.
func TestMetricsNamed(t *testing.T) {
	l := newLab(t)
	l.HTTP = "unix:" + l.dir + "/http"
	shipped, err := os.ReadFile(shippedConflist)
	kerneltest.Must(t, err)
	l.put("config/"+conflistName, string(shipped))
	l.ready()
	l.awaitMetrics("with the shipped conflist", map[string]float64{`podlace_ipam_addresses{family="ipv4",network="podlace",set="0",state="free"}`: 253,
		`podlace_attachments{network="podlace"}`: 0, `podlace_bandwidth_limits{direction="egress",network="podlace"}`: 0})
	text, series := l.scrape()
	if at := series["last_sync_timestamp_seconds"]; time.Since(time.Unix(int64(at), 0)).Abs() > time.Minute {
		t.Errorf("the last comparison was at %v", at)
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v: rename these metrics after the rules of Prometheus: %v", err, problems)
	}
	served := servedMetrics(text)
	listed, err := os.ReadFile("../../../integration/monitoring/testdata/podlace-node.txt")
	kerneltest.Must(t, err)
	if diff := cmp.Diff(strings.Split(strings.TrimSpace(string(listed)), "\n"), served); diff != "" {
		t.Errorf("integration/monitoring/testdata/podlace-node.txt is not what the agent serves: remove its lines with -, add the lines with +\n%s", diff)
	}
	document, err := os.ReadFile("../../../docs/OPERATING.md")
	kerneltest.Must(t, err)
	var told []string
	for _, match := range regexp.MustCompile("`(podlace_[a-z_]+)(?:{([a-z,]+)})?`").FindAllStringSubmatch(string(document), -1) {
		told = append(told, strings.TrimSpace(match[1]+" "+sorted(strings.Split(match[2], ","))))
	}
	for i, line := range served { // the document has no types
		fields := strings.Fields(line)
		served[i] = strings.Join(slices.Delete(fields, 1, 2), " ")
	}
	slices.Sort(told)
	if diff := cmp.Diff(slices.Compact(told), served); diff != "" {
		t.Errorf("docs/OPERATING.md names other metrics than the agent serves: remove the rows of the lines with -, add \"| `METRIC{LABELS}` | MEANING |\" "+
			"for each line with +\n%s", diff)
	}
}

// servedMetrics returns a line with name, type and labels for each of Podlace's metrics in a scrape.
func servedMetrics(text string) (lines []string) {
	kinds := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^# TYPE (podlace_\S+) (\S+)$`).FindAllStringSubmatch(text, -1) {
		kinds[match[1]] = match[2]
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "podlace_") {
			continue
		}
		name, labels, _ := strings.Cut(strings.TrimSpace(line), "{")
		name, _, _ = strings.Cut(name, " ")
		if base := regexp.MustCompile("_(bucket|sum|count)$").ReplaceAllString(name, ""); kinds[base] == "histogram" {
			name = base
		}
		var keys []string
		for _, label := range regexp.MustCompile(`([a-z]+)="`).FindAllStringSubmatch(labels, -1) {
			if label[1] != "le" {
				keys = append(keys, label[1])
			}
		}
		lines = append(lines, strings.TrimSpace(name+" "+kinds[name]+" "+sorted(keys)))
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

func sorted(labels []string) string {
	slices.Sort(labels)
	return strings.Join(labels, ",")
}
