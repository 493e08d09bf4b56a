// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/agent/podmetrics"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/restore"
	"github.com/podlace/podlace/pkg/store"
)

const (
	compareEvery = 5 * time.Minute // with the kernel, in case an event was lost
	leastRetry   = time.Second
	mostRetry    = 5 * time.Minute
	unknownFor   = 5 * time.Second // after the start, while the list of nodes is being read
)

// options holds the flags of podlace-node run.
type options struct {
	Node       string
	Config     string
	Kubeconfig string
	Plugins    string // empty: no plugins are installed
	HTTP       string // empty: no HTTP server

	times times
}

// agent keeps the routes and files of one node in the wanted state.
type agent struct {
	options
	log      *slog.Logger
	alarm    *alarm
	nodes    *nodes
	metrics  *metrics
	file     statusFile
	contests contests
	prober   *prober
	look     atomic.Pointer[restore.Look] // the last one of restore.Watch

	config   config
	inFile   config // the file's content at the last reading: a part of it may apply only after a restart
	refusal  string // why the configuration in the file is rejected
	binaries binaries
	roots    map[string]string // of the mounted folders, at the start
	orphan   error             // a mounted folder is no longer that of the node: the process must end

	self           noderoutes.Node // the node's own Node object, in its last known state
	peers          []PeerStatus
	node           nodefile.Node           // wanted content of node.json; without podCIDRs nothing is known yet
	advice         []Problem               // problems from the last comparison
	moreSpecific   map[netip.Prefix]string // route of another program to a part of a peer's podCIDR, by podCIDR; nil until they were read
	started        time.Time
	syncStart      time.Time     // start of the first comparison
	nextSync       time.Time     // time of the next comparison if no event comes before
	syncDuration   time.Duration // duration of the last comparison
	stale          bool          // the masquerade rules of pods have not been updated from node.json yet
	deletionsHeld  bool          // deletions of routes are held back
	routesWhenHeld int           // number of routes when that began
	suspectSince   time.Time     // since when the lists with the own node are suspicious
	stepFailed     bool          // the present step must be retried
	routesFailed   bool          // the last comparison must be retried
	retry          time.Duration // delay from the last attempt to the next one
	retryAt        time.Time     // zero: no retry is due
	problems       []Problem     // found by the present step
	logged         []Problem     // problems of the last step that were logged
	ready          bool
}

// run keeps the routes and files of the node up to date until ctx is done. They stay on the node afterwards.
func run(ctx context.Context, o options, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := readConfig(o.Config)
	if err != nil {
		return err
	}
	connections := newConnections()
	api, err := client(o.Kubeconfig, c.APIServer, connections)
	if err != nil {
		return err
	}
	unlock, err := lockNode(ctx, log)
	if err != nil {
		return err
	}
	defer unlock()
	a := newAgent(o, c, log)
	if o.HTTP != "" {
		server := probes.Server{Ready: a.metrics.ready, Metrics: a.metrics.registry, Log: log}
		if err := server.Start(ctx, o.HTTP, &a.metrics.serving); err != nil {
			return err
		}
		defer func() { cancel(); a.metrics.serving.Wait() }()
	}
	events, err := kernel.RouteEvents(ctx, noderoutes.Protocol)
	if err != nil {
		return err
	}
	go func() {
		for e := range events {
			log.Debug("the kernel", "changed", e.What, "removed", e.Removed, "lost", e.Lost)
			if connections.prune() > 0 {
				log.Info("the node lost the address by which it watched the nodes of the cluster: restarting the watch")
			}
			a.alarm.wake(onKernel)
		}
	}()
	a.watchFiles(ctx)
	var running sync.WaitGroup
	if c.Routes { // otherwise the agent has no CAP_NET_ADMIN
		running.Go(func() { a.watchPods(ctx, api, &running) })
	}
	running.Go(func() { a.prober.run(ctx, a.times.probe, func() { a.alarm.wake(onLook) }) })
	done := make(chan struct{})
	go func() {
		defer close(done)
		connections.keep(ctx, func(ctx context.Context) { watchNodes(ctx, api, a.nodes) })
	}()
	a.loop(ctx)
	cancel()
	<-done
	running.Wait()
	return a.orphan
}

func newAgent(o options, c config, log *slog.Logger) *agent {
	alarm := newAlarm()
	nodes := newNodes(func() { alarm.wake(onAPI) }, log)
	a := &agent{options: o, started: time.Now(), stale: true, config: c, inFile: c, log: log, alarm: alarm, nodes: nodes,
		metrics: newMetrics(nodes, podmetrics.New(c.ConfDir, log)), binaries: newBinaries(o.Plugins, c.BinDir), contests: contests{},
		prober: newProber(nodes, log)}
	a.roots = mountRoots(a.folders()...)
	return a
}

// watchFiles wakes the main loop when a file changes that the agent reads or owns.
func (a *agent) watchFiles(ctx context.Context) {
	folder := func(dir string, concerns func(name string) bool) {
		if dir != "" {
			go watch.Folder(ctx, dir, func(name string) {
				if name == "" || concerns(name) {
					a.alarm.wake(onFiles)
				}
			}, a.log)
		}
	}
	// The kubelet changes a ConfigMap volume by replacing the symlink ..data.
	folder(filepath.Dir(a.Config), func(name string) bool {
		return name == "..data" || name == filepath.Base(a.Config) || name == conflistName
	})
	folder(store.Root, func(name string) bool { return name == filepath.Base(nodefile.Path) })
	folder(a.config.ConfDir, func(string) bool { return true })
	if a.Plugins != "" {
		folder(a.config.BinDir, func(name string) bool {
			return slices.ContainsFunc(programs(), func(p program) bool { return p.to == name })
		})
	}
}

// loop calls step until ctx is done or the process must end.
func (a *agent) loop(ctx context.Context) {
	causes := map[cause]bool{onStart: true}
	for ctx.Err() == nil {
		if a.orphan = a.orphaned(); a.orphan != nil {
			return
		}
		again := a.step(causes)
		causes = a.alarm.wait(ctx, again, collectWindow(a.syncDuration), a.contests.wait(time.Now()))
		if len(causes) == 0 {
			causes = map[cause]bool{onLook: true}
		}
	}
}

// step brings the node into the wanted state; nothing else changes the node. The next call is due at again if no event comes earlier.
func (a *agent) step(causes map[cause]bool) (again time.Time) {
	a.problems, a.stepFailed = nil, false
	why := mainCause(causes)
	if a.reload() {
		why = onStart
	}
	a.checkOrphans()
	installed := a.install(why)
	due := a.due(time.Now())
	if due && why == onLook {
		why = onPeriod
	}
	switch {
	case why != onLook && why != onFiles:
		a.route(why)
	case due: // also if files change all the time
		a.route(onPeriod)
	}
	a.problems = append(a.problems, a.advice...)
	a.addLook()
	a.writeNodeFile(why)
	if installed {
		a.writeConflist(why)
	}
	again = a.publish()
	switch now := time.Now(); {
	case !a.stepFailed && !a.routesFailed:
		a.retry, a.retryAt = 0, time.Time{}
	case !now.Before(a.retryAt):
		a.retry = min(max(2*a.retry, leastRetry), mostRetry)
		a.retryAt = now.Add(a.retry)
	}
	return earlier(again, a.retryAt)
}

// due reports whether it is time for a periodic comparison or a retry.
func (a *agent) due(now time.Time) bool {
	return !a.retryAt.IsZero() && !now.Before(a.retryAt) || !now.Before(a.nextSync)
}

// mainCause returns the most important cause, for the log.
func mainCause(causes map[cause]bool) cause {
	for _, why := range []cause{onStart, onAPI, onKernel, onFiles, onPeriod} {
		if causes[why] {
			return why
		}
	}
	return onLook
}

// addProblem adds a problem to the status. That alone causes no retry.
func (a *agent) addProblem(what string, err error, do string, blocking bool) {
	a.problems = append(a.problems, Problem{What: what, Why: err.Error(), Do: do, blocking: blocking})
}

func (a *agent) logChanges(kind string, why cause, n int, text string, args ...any) {
	if n == 0 {
		return
	}
	a.metrics.changes.WithLabelValues(kind, string(why)).Add(float64(n))
	a.log.Info(text, append(args, "cause", why)...)
	if (why == onKernel || why == onFiles) && a.contests.repaired(kind, time.Now()) {
		a.log.Warn("another program repeatedly undoes changes of podlace-node: repairs slow down to one in 30 s until that program is stopped", "what", kind)
	}
}

// install copies the plugins into the runtime's folder, and reports whether all of them are there.
func (a *agent) install(why cause) bool {
	if a.Plugins == "" || a.config.BinDir == "" {
		return true
	}
	replaced, err := a.binaries.install()
	a.logChanges("binary", why, len(replaced), "installed plugins that were missing or differed", "files", strings.Join(replaced, " "))
	if err != nil {
		a.stepFailed = true
		a.addProblem("plugins", err, "make binDir writable on the node, and delete the agent's pod if its mount stays read-only; "+
			"--plugins must name the folder of the image's plugins", true)
	}
	return err == nil
}

// writeNodeFile writes node.json for the plugins. Failing routes delay the first one for at most firstFileDelay.
func (a *agent) writeNodeFile(why cause) {
	if len(a.node.PodCIDRs) == 0 {
		return
	}
	file, before, err := nodefile.Read()
	there := err == nil && file == nodefile.Path
	failed := slices.ContainsFunc(a.peers, func(p PeerStatus) bool { return p.State == noderoutes.Failed })
	if failed && !there && time.Since(a.syncStart) < a.times.firstFileDelay {
		a.nextSync = earlier(a.nextSync, a.syncStart.Add(a.times.firstFileDelay))
		a.addProblem("node.json", fmt.Errorf("node.json waits for failing routes, for at most %v", a.times.firstFileDelay), "nothing: node.json is written after that time", true)
		return
	}
	node := a.node
	if node.MTU == 0 && there { // an uplink that is down reports no MTU
		node.MTU = before.MTU
	}
	changed, err := nodefile.Write(node)
	if err != nil {
		a.stepFailed = true
		a.addProblem("node.json", err, "remove what is at "+nodefile.Path+", and make its folder writable", true)
		return
	}
	if changed {
		a.logChanges("node", why, 1, "wrote node.json", "podCIDRs", orNone(node.PodCIDRs), "clusterCIDRs", len(node.ClusterCIDRs), "mtu",
			node.MTU)
	}
	a.stale = a.stale || changed && there && !slices.Equal(before.ClusterCIDRs, node.ClusterCIDRs)
	if !a.stale || !a.config.Routes { // without routes the agent needs no CAP_NET_ADMIN; the next ADD updates the rules
		return
	}
	if err := bridge.RenewClusterCIDRs(a.log); err != nil {
		a.stepFailed = true
		a.addProblem("masquerade", err, "nothing if the next attempt succeeds; otherwise run podlace reload", false)
		return
	}
	a.stale = false
}

// writeConflist writes the conflist for the container runtime, last of all, because pods can start as soon as it exists.
func (a *agent) writeConflist(why cause) {
	if a.config.ConfDir == "" {
		return
	}
	file, node, err := nodefile.Read()
	if err != nil || file != nodefile.Path {
		return // a recorded problem has the reason
	}
	if len(node.ClusterCIDRs) == 0 && len(a.config.ClusterCIDRs) > 0 {
		return // this node.json is not the agent's, and the conflist may use these CIDRs
	}
	if missing := missingPlugins(a.config.conflist, a.config.BinDir); a.config.BinDir != "" && len(missing) > 0 {
		a.stepFailed = true
		a.addProblem("conflist", fmt.Errorf("%s names plugins that are not in %s: %s", conflistName, a.config.BinDir, strings.Join(missing, " ")),
			"install them, or correct the conflist", true)
		return
	}
	path := filepath.Join(a.config.ConfDir, conflistName)
	changed, err := writeConflist(a.config.ConfDir, a.config.conflist)
	if err == nil && changed {
		a.logChanges("conflist", why, 1, "wrote the conflist, which was missing or differed", "file", path)
	}
	first, multus, readErr := shadowing(a.config.ConfDir, networkName(a.config.conflist))
	if err == nil && readErr == nil && len(first) > 0 && a.config.TakeOver {
		a.warnOfLeases(first)
		if err = takeOver(a.config.ConfDir, first); err == nil {
			a.logChanges("conflist", why, len(first), "took over: other configurations of the runtime got the suffix "+backup,
				"folder", a.config.ConfDir, "files", strings.Join(first, " "))
			first = nil
		}
	}
	if err == nil {
		err = readErr
	}
	switch {
	case err != nil:
		a.stepFailed = true
		a.addProblem("conflist", err, "make confDir writable", true)
	case len(first) > 0:
		a.addProblem("conflist", fmt.Errorf("%s is shadowed by %s: the runtime takes the first by name", path, strings.Join(first, " ")),
			"pods start in the other network: remove its file, or set takeOver", true)
	case len(multus) > 0:
		a.addProblem("conflist", fmt.Errorf("%s is shadowed by %s: Multus hands pods to another network", path, strings.Join(multus, " ")),
			fmt.Sprintf(`write "clusterNetwork": %q instead of "delegates" into Multus' configuration; the path is that in Multus' pod`, path), true)
	}
}

// publish updates the status file and the metrics. The caller must call it again at the returned time.
func (a *agent) publish() (again time.Time) {
	heard, failure := a.nodes.watched()
	if failure != "" {
		a.addProblem("API server", fmt.Errorf("the nodes are not watched since %s: %s", heard.UTC().Format(time.RFC3339), failure),
			a.nodes.advice(), false)
	}
	early := false
	if len(a.node.PodCIDRs) == 0 && len(blocked(a.problems)) == 0 {
		early = failure == "" && time.Since(a.started) < unknownFor
		a.addProblem("nodes", errors.New("no complete list of the nodes has been received yet"), "check that the API server answers", true)
	}
	ready := len(blocked(a.problems)) == 0
	if !early {
		a.logProblems()
	}
	if ready != a.ready {
		a.log.Info("readiness has changed", "ready", ready)
	}
	a.ready = ready
	peers := a.prober.mark(a.peers)
	s := Status{Node: a.Node, Ready: ready, Routes: a.config.Routes, PodCIDRs: a.node.PodCIDRs, ClusterCIDRs: a.node.ClusterCIDRs,
		MTU: a.node.MTU, Peers: peers, Problems: append(slices.Clone(a.problems), peerProblems(peers)...)}
	a.metrics.set(s, a.deletionsHeld, a.refusal != "")
	if early { // the status of the previous agent is still true
		return a.started.Add(unknownFor)
	}
	again, err := a.file.write(s, time.Now())
	if err != nil {
		a.log.Error("could not write the status file, so 'podlace-node status' is out of date; retrying", "error", err)
	}
	return earlier(earlier(again, time.Now().Add(a.times.poll)), a.nextSync)
}
