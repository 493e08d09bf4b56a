// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// sample counts pods that have this at a time after a flush.
type sample struct {
	after                    time.Duration
	ports, hostPorts, limits int
}

// curve samples until all pods have everything again.
func (l *healLab) curve(flushed time.Time) (samples []sample) {
	l.Helper()
	l.await("restored for the curve", func() bool {
		s := sample{after: time.Since(flushed)}
		ports, _ := os.ReadDir("/sys/class/net/heal0/brif") // absent while the bridge is
		s.ports = len(ports)
		s.hostPorts = strings.Count(harness.Shell(l.T, "nft list map inet podlace_hostport ports4 2>&1 || true"), " : ")
		qdiscs, err := netlink.QdiscList(nil)
		kerneltest.Must(l, err)
		for _, q := range qdiscs {
			if _, is := q.(*netlink.Tbf); is {
				s.limits++
			}
		}
		samples = append(samples, s)
		return min(s.ports, s.hostPorts, s.limits/2) == len(l.pods) // a limit each way
	})
	return samples
}

// drawCurve returns an SVG image of the samples in percent of the pods.
func drawCurve(samples []sample, pods int, byHand time.Duration) string {
	const width, height, left, top = 340, 140, 40, 10
	end := max(samples[len(samples)-1].after, byHand) + 50*time.Millisecond
	x := func(t time.Duration) float64 { return left + width*float64(t)/float64(end) }
	y := func(n, of int) float64 { return top + height*(1-float64(n)/float64(of)) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 210" width="400" height="210" role="img">
<title>Percent of %d pods that are restored by milliseconds after a flush of everything</title>
<style>text { font: 12px sans-serif; fill: #24292f } polyline, path { fill: none; stroke-width: 2 }
.axis, .hand { stroke: #8c959f; stroke-width: 1 }
.hand { stroke-dasharray: 4 } .ports { stroke: #1f6feb } .hostports { stroke: #bf8700 } .limits { stroke: #1a7f37 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }</style>
<path class="axis" d="M%d %d V%d H%d"/><text x="0" y="%d">100 %%</text><text x="%d" y="%d">0</text>
`, pods, left, top, top+height, left+width, top+10, left-10, top+height)
	for ms := 200; time.Duration(ms)*time.Millisecond < end; ms += 200 {
		fmt.Fprintf(&b, "<text x=\"%.0f\" y=\"%d\">%d</text>\n", x(time.Duration(ms)*time.Millisecond)-10, top+height+16, ms)
	}
	fmt.Fprintf(&b, "<path class=\"hand\" d=\"M%.0f %d V%d\"/>\n", x(byHand), top, top+height)
	for _, line := range []struct {
		class string
		of    int
		get   func(sample) int
	}{{"ports", pods, func(s sample) int { return s.ports }}, {"hostports", pods, func(s sample) int { return s.hostPorts }},
		{"limits", 2 * pods, func(s sample) int { return s.limits }}} {
		fmt.Fprintf(&b, "<polyline class=%q points=\"", line.class)
		for _, s := range samples {
			fmt.Fprintf(&b, "%.1f,%.1f ", x(s.after), y(min(line.get(s), line.of), line.of))
		}
		b.WriteString("\"/>\n")
	}
	for i, key := range [][2]string{{"ports", "bridge ports"}, {"hostports", "hostPorts"}, {"limits", "limits"},
		{"hand", "reload by hand"}} {
		at := []int{left, left + 90, left + 165, left + 220}[i]
		fmt.Fprintf(&b, "<path class=%q d=\"M%d 194 h14\"/><text x=\"%d\" y=\"198\">%s</text>\n", key[0], at, at+17, key[1])
	}
	return b.String() + "</svg>\n"
}

// TestDrawCurve: the picture has each sample.
func TestDrawCurve(t *testing.T) {
	got := drawCurve([]sample{{0, 0, 0, 0}, {100 * time.Millisecond, 2, 1, 2}, {150 * time.Millisecond, 2, 2, 4}}, 2, 50*time.Millisecond)
	for _, want := range []string{`class="ports" points="40.0,150.0 210.0,10.0 295.0,10.0 "`, `class="limits" points="40.0,150.0 210.0,80.0 295.0,10.0 "`} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
}
