// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/meter"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// bin is the folder with the plugin.
func bin(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("PODLACE_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	build := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "../../plugins/"+plugin)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return dir
}

// TestPod: the plugin makes of burst and latency what the plot says, and nothing stays.
func TestPod(t *testing.T) {
	folder := bin(t)
	kerneltest.Clean(t)
	const bytesPerMillisecond = rate / 8 / 1000
	for _, c := range []struct {
		limit        limit
		burst, queue uint32
	}{
		{limit{}, 4 * bytesPerMillisecond, 10 * bytesPerMillisecond},
		{limit{burst: "16M"}, 2_000_000, 0},
		{limit{latency: 50 * time.Millisecond}, 4 * bytesPerMillisecond, 50 * bytesPerMillisecond},
	} {
		c.limit.folder = folder
		var got kernel.Shaper
		if err := withPod(c.limit, func(p *pod) error { got = p.shaper; return nil }); err != nil {
			t.Fatal(err)
		}
		if got.Rate != rate || got.Burst < c.burst*98/100 || got.Burst > c.burst*102/100 || c.queue > 0 && got.Limit != c.queue {
			t.Errorf("%+v: %v, want a burst of %d and a queue of %d bytes", c.limit, got, c.burst, c.queue)
		}
	}
	failed := errors.New("failed")
	if err := withPod(limit{folder: folder}, func(*pod) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("got %v", err)
	}
	if err := withPod(limit{folder: folder, burst: "much"}, func(*pod) error { return nil }); err == nil || !strings.Contains(err.Error(), "much") {
		t.Errorf("got %v, want what the plugin says", err)
	}
}

func TestWrite(t *testing.T) {
	o := options{out: filepath.Join(t.TempDir(), "new")}
	c := &curve{title: "one burst"}
	for _, bytes := range []float64{1e6, 5e6, 2e6} { // in the first step; the rate later
		var came meter.Arrivals
		for i := range 2 + int(shown/step) {
			came = append(came, meter.Arrival{At: time.Duration(i+1) * step, Wire: bytes + float64(i)*125e3})
		}
		c.add(came)
	}
	p := &point{latency: 5 * time.Millisecond, goodput: []float64{99}}
	seen := meter.RoundTrips{Sent: 25, Lost: 5}
	for i := 20; i > 0; i-- {
		seen.Samples = append(seen.Samples, time.Duration(i)*time.Millisecond)
	}
	p.add(seen)
	p.add(meter.RoundTrips{Sent: 25, Lost: 25}) // has no times
	p.add(seen)
	silent := &point{latency: 20 * time.Millisecond, lost: []float64{100}, goodput: []float64{99}}
	if err := o.write([]*curve{c}, []*point{p, silent}); err != nil {
		t.Fatal(err)
	}
	bursts := strings.Split(read(t, o.out, "bursts.dat"), "\n")
	if diff := cmp.Diff([]string{`"seconds" "one burst"`, "0.000 0.000", "0.100 16.000", "0.200 17.000"}, bursts[:4]); diff != "" || len(bursts) != 23 || bursts[21] != "2.000 35.000" {
		t.Errorf("(-want +got):\n%s%q", diff, bursts)
	}
	want := "\"latency\" \"median\" \"95th percentile\" \"lost\" \"goodput\"\n5.000 10.000 19.000 20.000 99.000\n20.000 NaN NaN 100.000 99.000\n"
	if got := read(t, o.out, "latency.dat"); got != want {
		t.Errorf("got %s", got)
	}
	if got := read(t, o.out, "facts.gp"); got != "queue = \"all flows in one queue\"\ncurves = 1\n" {
		t.Errorf("got %s", got)
	}
}

func read(t *testing.T, folder, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
