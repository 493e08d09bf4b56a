// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
)

// Flags of TestScale.
var (
	sizes    = flag.String("nodes", "", "numbers of nodes with which an agent is measured, such as 1000,5000")
	updating = flag.Duration("for", 3*time.Minute, "how long the nodes report their status")
)

// The load of TestScale.
const (
	watchers = 50
	joining  = 1000
	within   = time.Minute
)

type scaleRow struct {
	nodes          int
	lists          string
	start          time.Duration // from the start of the agent to all routes
	started, peak  int64         // peak of the resident memory after the start, and at the end
	updates, joins float64       // percent of a core
	lags           []time.Duration
	agentLag       time.Duration // the agent's share of the delay, on average
	writes         int           // at a restart
	load           string
}

// TestScale measures one agent among thousands of nodes and prints the times. It fails if routes are missing, if a restarted agent changes
// routes or files, or if it needs more memory than the DaemonSet permits.
func TestScale(t *testing.T) {
	if *sizes == "" {
		t.Skip("SKIPPED: no number of nodes is given; make scale measures 1,000 and 5,000")
	}
	needAPI(t)
	var rows []scaleRow
	for size := range strings.SplitSeq(*sizes, ",") {
		nodes, err := strconv.Atoi(size)
		kerneltest.Must(t, err)
		t.Run(size+" streamed", func(t *testing.T) { rows = append(rows, measureAgent(t, nodes, "stream")) })
		t.Run(size+" in pages", func(t *testing.T) {
			rows = append(rows, measureAgent(t, nodes, "pages", "--feature-gates=WatchList=false"))
		})
	}
	printRows(t, rows)
}

func printRows(t *testing.T, rows []scaleRow) {
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "nodes\tfirst list\tstart to all routes\tpeak RSS after it\tpeak RSS\tCPU, status updates\tCPU, joins\tlag of joins\tagent's part\twrites at a restart\tload")
	for _, r := range rows {
		fmt.Fprintf(w, "%d\t%s\t%.2f s\t%d MB\t%d MB\t%.1f %%\t%.1f %%\t%s\t%s\t%d\t%s\n", r.nodes, r.lists, r.start.Seconds(), r.started/1e6, r.peak/1e6,
			r.updates, r.joins, quantiles(r.lags), milliseconds(r.agentLag), r.writes, r.load)
	}
	kerneltest.Must(t, w.Flush())
	t.Logf("figures:\n%s", table.String())
}

// measureAgent measures the agent of the first node in a cluster with the given number of nodes.
func measureAgent(t *testing.T, nodes int, lists string, flags ...string) scaleRow {
	createLinks(t)
	p := newPlane(t, flags...)
	began := time.Now()
	p.fillCluster(1, nodes)
	t.Logf("%d nodes made in %.0f s, load %s", nodes, time.Since(began).Seconds(), loadAverages())
	n := p.newNode(1, "lan")
	r := scaleRow{nodes: nodes, lists: lists}

	began = time.Now()
	n.startAgent()
	n.awaitFile()
	r.start = time.Since(began)
	n.checkAllRoutes(nodes)
	var err error
	r.started, err = n.agent.peakMemory()
	kerneltest.Must(t, err)
	t.Logf("all routes %.2f s after the start of the agent, peak RSS %d MB, load %s", r.start.Seconds(), r.started/1e6, loadAverages())

	b := p.startLoad(nodes, watchers)
	n.awaitReady()
	time.Sleep(2 * time.Second)
	percent := measureCPU(t, n.agent)
	time.Sleep(*updating)
	r.updates = percent()
	t.Logf("%.1f %% of a core at %d status updates in %s, load %s", r.updates, b.updates.Load(), *updating, loadAverages())

	percent = measureCPU(t, n.agent)
	sum, count := n.agentLag()
	r.lags = n.joinMany(nodes)
	sumAfter, countAfter := n.agentLag()
	r.agentLag = time.Duration(float64(time.Second) * (sumAfter - sum) / max(countAfter-count, 1))
	r.joins, r.load = percent(), loadAverages()
	n.checkAllRoutes(nodes + joining)
	t.Logf("%.1f %% of a core at %d joins, %s, load %s", r.joins, joining, quantiles(r.lags), r.load)

	r.peak, err = n.agent.peakMemory()
	kerneltest.Must(t, err)
	limits := shippedContainer(t).Resources.Limits
	if limit := limits.Memory().Value(); r.peak > limit {
		t.Errorf("the agent needed %d bytes, and the DaemonSet allows %d", r.peak, limit)
	}
	r.writes = n.restartAgent()
	b.stop()
	if err := b.failure.Load(); err != nil || b.updates.Load() == 0 || b.events.Load() == 0 {
		t.Errorf("the load failed: %v, %d updates, %d bytes to the watchers", err, b.updates.Load(), b.events.Load())
	}
	return r
}

// awaitFile waits until the agent has written node.json. The agent writes node.json after it has added all routes.
func (n *agentNode) awaitFile() {
	n.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(n.dir + "/run/node.json"); err == nil {
			return
		}
		if time.Now().After(end) {
			n.Fatal("no node.json")
		}
	}
}

// checkAllRoutes checks that the kernel has a route to each of the given number of nodes, and no other route.
func (n *agentNode) checkAllRoutes(nodes int) {
	n.Helper()
	got, missing := n.routeGateways(), []netip.Prefix{}
	for id := 1; id <= nodes; id++ {
		for family, cidr := range podCIDRs(id) {
			if gateway, there := got[cidr]; !there || id > 1 && gateway.String() != nodeAddresses(id, "lan")[family] {
				missing = append(missing, cidr)
			}
		}
	}
	if len(missing) > 0 || len(got) != 2*nodes {
		n.Errorf("%d routes of %d, %d missing or wrong: %v\n%s", len(got), 2*nodes, len(missing), missing[:min(len(missing), 10)],
			n.statusProblems())
	}
}

// joinMany adds nodes evenly within a minute, and returns how long the agent needed for the routes to each.
func (n *agentNode) joinMany(nodes int) []time.Duration {
	n.Helper()
	heard := n.recordArrivals()
	var mu sync.Mutex
	var failure error
	before := map[int]time.Time{}
	var running sync.WaitGroup
	every := time.NewTicker(within / joining)
	defer every.Stop()
	for id := nodes + 1; id <= nodes+joining; id++ {
		<-every.C
		running.Go(func() {
			at, err := n.joinNode(fullObject(id), id)
			mu.Lock()
			defer mu.Unlock()
			before[id] = at
			if err != nil {
				failure = err
			}
		})
	}
	running.Wait()
	kerneltest.Must(n, failure)
	var lags []time.Duration
	for id, at := range before {
		lags = append(lags, heard.awaitRoutes(n.T, podCIDRs(id)).Sub(at))
	}
	if gone := heard.deletedRoutes(); gone > 0 {
		n.Errorf("%d routes were deleted when nodes joined", gone)
	}
	if heard.droppedEvents() {
		n.Log("the kernel dropped events: some measured lags are longer than the real ones")
	}
	return lags
}

// listPatience is how long an agent waits for the list of nodes before its status reports that it has none.
const listPatience = 5 * time.Second

// restartAgent restarts the agent while nothing changes, and returns how often the kernel and files were written. It tries up to three
// times, because link events of the kernel can look like writes, while real writes occur at every restart.
func (n *agentNode) restartAgent() int {
	n.Helper()
	var got []string
	for range 3 {
		if got = n.restartOnce(); len(got) == 0 {
			return 0
		}
		n.Logf("a restart wrote %d times: %q", len(got), got[:min(len(got), 20)])
	}
	n.Errorf("each restart wrote")
	return len(got)
}

func (n *agentNode) restartOnce() []string {
	n.Helper()
	time.Sleep(1500 * time.Millisecond) // the status is written once a second
	n.stopAgent()
	changes := n.monitorWrites()
	began := time.Now()
	n.startAgent()
	n.awaitReady()
	slow := time.Since(began) > listPatience
	time.Sleep(1500 * time.Millisecond)
	got := changes()
	if slow {
		n.Logf("ready %.1f s after the restart: what the status said meanwhile does not count", time.Since(began).Seconds())
		got = slices.DeleteFunc(got, func(change string) bool { return strings.HasSuffix(change, "node-status.json") })
	}
	return got
}
