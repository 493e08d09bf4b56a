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

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// scrape returns the metrics as text, and their values by series: a name with its labels, as in the text.
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

// shows waits until series have these values.
func (l *lab) shows(when string, want map[string]float64) {
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

// TestMetrics checks the value of each metric after an event that affects it.
func TestMetrics(t *testing.T) {
	l := newLab(t)
	l.HTTP = "unix:" + l.dir + "/http"
	younger := nodeObject("n8", []string{"10.244.2.0/24"}, []string{"192.0.2.8"})
	younger.CreationTimestamp.Time = time.Unix(2_000_000, 0)
	l.api.put(younger)
	l.ready()
	l.shows("at the start", map[string]float64{`peers{state="direct"}`: 4, `peers{state="refused"}`: 1, `peers{state="conflict"}`: 1,
		`peers{state="vxlan"}`: 0, `peers{state="fabric"}`: 0, `peers{state="failed"}`: 0, `routes{family="ipv4"}`: 3, `routes{family="ipv6"}`: 3,
		"ready": 1, "mtu": 1500, "problems": 2, "deletions_held": 0, "config_refused": 0, "kernel_removals_total": 0,
		"route_lag_seconds_count": 1, `changes_total{cause="start",kind="binary"}`: 5})
	_, first := l.scrape()
	for _, kind := range []string{"route", "node", "conflist"} { // the list of nodes arrives with the first step or later
		got := first[fmt.Sprintf(`changes_total{cause="api",kind=%q}`, kind)] + first[fmt.Sprintf(`changes_total{cause="start",kind=%q}`, kind)]
		if want := map[string]float64{"route": 10, "node": 1, "conflist": 1}[kind]; got != want {
			t.Errorf("%v changes of kind %s, want %v", got, kind, want)
		}
	}
	// The age grows without events, and an event resets it.
	age := func() float64 { _, series := l.scrape(); return series["watch_age_seconds"] }
	old := age()
	l.await("the age grows", func() bool { return age() > old+0.1 })
	old = age()
	l.api.put(l.peer(2))
	l.await("an event ends it", func() bool { return age() < old })

	// The route may be restored after the removal itself, or after an event of the API server just before it.
	repairs := func() (n float64) {
		_, series := l.scrape()
		for _, cause := range []string{"kernel", "api", "start"} {
			n += series[fmt.Sprintf(`changes_total{cause=%q,kind="route"}`, cause)]
		}
		return n
	}
	before := repairs()
	kerneltest.Must(t, netlink.RouteDel(&netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.3.0/24"))}))
	l.shows("a route was removed", map[string]float64{"kernel_removals_total": 1, `routes{family="ipv4"}`: 3})
	l.await("the route is back, by one change", func() bool { return repairs() == before+1 })
	if _, now := l.scrape(); first["sync_seconds_count"] < 1 || now["sync_seconds_count"] <= first["sync_seconds_count"] {
		t.Errorf("%v comparisons, %v after one more", first["sync_seconds_count"], now["sync_seconds_count"])
	}
	kerneltest.Must(t, os.Remove(l.dir+"/net.d/"+conflistName), os.Remove(l.dir+"/bin/podlace-bridge"))
	l.shows("files were removed", map[string]float64{`changes_total{cause="files",kind="conflist"}`: 1,
		`changes_total{cause="files",kind="binary"}`: 1})
	config := l.read("config/config.json")
	l.put("config/config.json", "{")
	l.shows("a wrong configuration", map[string]float64{"config_refused": 1, "ready": 1, "problems": 3})
	l.put("config/config.json", strings.Replace(config, "{", `{"offLink": "fabric", "mtu": 1400, `, 1))
	l.shows("another configuration", map[string]float64{"config_refused": 0, "mtu": 1400, `peers{state="fabric"}`: 1,
		`peers{state="refused"}`: 0, "problems": 1})
	for _, name := range []string{"n8", "n3", "n2"} {
		l.api.remove(name, true)
	}
	l.api.hangUp(true)
	l.shows("a suspicious list", map[string]float64{"deletions_held": 1, `peers{state="direct"}`: 0, `routes{family="ipv4"}`: 3,
		`routes{family="ipv6"}`: 3})
	l.put("net.d/05-other.conflist", "{}")
	l.shows("another network", map[string]float64{"ready": 0})
}

// TestMetricsNamed checks that the table of docs/CLUSTER.md names exactly these metrics and labels, and that they follow the rules of
// Prometheus.
func TestMetricsNamed(t *testing.T) {
	l := newLab(t)
	l.HTTP = "unix:" + l.dir + "/http"
	l.ready()
	text, _ := l.scrape()
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", err, problems)
	}
	document, err := os.ReadFile("../../docs/CLUSTER.md")
	kerneltest.Must(t, err)
	var told, served []string
	for _, match := range regexp.MustCompile("`(podlace_node_[a-z_]+)(?:{([a-z,]+)})?`").FindAllStringSubmatch(string(document), -1) {
		told = append(told, match[1]+" "+match[2])
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "podlace_") {
			continue
		}
		name, labels, _ := strings.Cut(strings.TrimSpace(line), "{")
		name, _, _ = strings.Cut(name, " ")
		if regexp.MustCompile("_seconds_(bucket|sum|count)$").MatchString(name) {
			name, labels = name[:strings.LastIndex(name, "_")], ""
		}
		var keys []string
		for _, label := range regexp.MustCompile(`([a-z]+)="`).FindAllStringSubmatch(labels, -1) {
			keys = append(keys, label[1])
		}
		slices.Sort(keys)
		served = append(served, name+" "+strings.Join(keys, ","))
	}
	for i, match := range told {
		name, labels, _ := strings.Cut(match, " ")
		keys := strings.Split(labels, ",")
		slices.Sort(keys)
		told[i] = name + " " + strings.Join(keys, ",")
	}
	slices.Sort(told)
	slices.Sort(served)
	if told, served := slices.Compact(told), slices.Compact(served); !slices.Equal(told, served) || len(told) < 10 {
		t.Errorf("docs/CLUSTER.md names\n%s\nserved are\n%s", strings.Join(told, "\n"), strings.Join(served, "\n"))
	}
}
