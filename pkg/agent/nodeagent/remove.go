// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/store"
)

const (
	removeWait = 30 * time.Second // for the agent to end
	removePoll = 2 * time.Second  // between checks of the remaining pods
)

// removal undoes the changes of the agent and the plugins on this node. It first keeps new pods from using Podlace: they use another
// network, or their ADD fails because node.json is gone. The conflist, the routes and the plugins stay while pods need them for packets and
// DEL, and are deleted after the last one.
type removal struct {
	binDir, confDir string // empty: the agent did not write there
	config          string // the agent's configuration; the conflist is beside it
	http            string // address of /readyz, which succeeds after the removal; empty: no server
	wait            bool   // wait for pods, and afterwards for SIGTERM
	poll            time.Duration
	out             io.Writer
	log             *slog.Logger

	known       []reconcile.Network
	lastPrinted string // last printed line about the remaining pods

	mu    sync.Mutex
	state error // nil: the removal is complete
}

func (r *removal) run(ctx context.Context) error {
	locking, cancel := context.WithTimeout(ctx, removeWait)
	defer cancel()
	unlock, err := lockNode(locking, r.log)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("podlace-node runs on this node and would undo the removal: delete its DaemonSet or stop its service first")
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := r.checkFolder(); err != nil {
		return err
	}
	r.knownNetworks()
	r.setState(errors.New("the removal has just begun"))
	ctx, stop := context.WithCancel(ctx)
	serving, err := r.serveReady(ctx)
	defer func() { stop(); serving.Wait() }()
	if err != nil {
		return err
	}
	if err := r.awaitPods(ctx); err != nil {
		return err
	}
	if err := r.removeRest(); err != nil {
		return err
	}
	r.setState(nil)
	if r.wait {
		r.printLines("done: Podlace is removed from this node; waiting for SIGTERM")
		<-ctx.Done()
	}
	return nil
}

// awaitPods keeps new pods from using Podlace and waits until no pod needs it. Without r.wait it checks only once.
func (r *removal) awaitPods(ctx context.Context) error {
	for {
		err := r.blockNewPods()
		remain, notes, podErr := r.remainingPods()
		if err = errors.Join(err, podErr, r.usersOfPlugins()); err == nil && len(remain) > 0 {
			err = fmt.Errorf("pods that still need Podlace, which therefore stays: %s (%d); delete them, or move them to another network",
				strings.Join(remain, ", "), len(remain))
		}
		if err == nil {
			return nil
		}
		r.setState(err)
		text := strings.Join(append(notes, err.Error()), "\n")
		if !r.wait {
			r.printLines(notes...)
			return fmt.Errorf("%w; then remove again", err)
		}
		if text != r.lastPrinted {
			r.lastPrinted = text
			r.printLines(text)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(r.poll):
		}
	}
}

// blockNewPods keeps new pods from using Podlace. It removes the conflist only if another network has one, because a runtime without any
// cannot delete pods.
func (r *removal) blockNewPods() error {
	var errs []error
	if r.confDir != "" {
		done, err := undoTakeOver(r.confDir, r.binDir)
		r.printLines(done...)
		next, readErr := nextConfig(r.confDir)
		errs = append(errs, err, readErr)
		if next != "" {
			errs = append(errs, r.dropConflist(", as "+filepath.Join(r.confDir, next)+" is there"))
		}
	}
	return errors.Join(append(errs, r.removeFile(nodefile.Path, nodefile.Remove))...)
}

func (r *removal) dropConflist(why string) error {
	removed, err := removeConflist(r.confDir)
	if removed {
		r.printLines("removed " + filepath.Join(r.confDir, conflistName) + why)
	}
	return err
}

// removeRest removes what pods need until their DEL, so it is called after the last one is gone.
func (r *removal) removeRest() error {
	var errs []error
	networks := r.knownNetworks()
	if r.confDir != "" {
		errs = append(errs, r.dropConflist(""))
	}
	changes, err := removeRoutes()
	if changes > 0 {
		r.printLines(fmt.Sprintf("removed routes, nexthops and the tunnel: %d changes", changes))
	}
	errs = append(errs, err, r.removeFile(store.Root+"/"+statusName, removeStatus))
	if r.binDir == "" {
		return errors.Join(errs...)
	}
	errs = append(errs, r.removeLeftovers(networks))
	done, err := removePrograms(r.binDir)
	r.printLines(done...)
	return errors.Join(append(errs, err)...)
}

// usersOfPlugins returns an error with the files of other networks that name the plugins: pods of these networks could then be neither made
// nor deleted.
func (r *removal) usersOfPlugins() error {
	if r.binDir == "" || r.confDir == "" {
		return nil
	}
	networks, _, err := reconcile.Networks(r.confDir)
	var names []string
	for _, p := range programs() {
		if !p.missing {
			names = append(names, p.to)
		}
	}
	errs, known := []error{err}, r.knownNetworks()
	for _, u := range reconcile.Users(networks, names...) {
		own := slices.ContainsFunc(known, func(n reconcile.Network) bool { return n.Name == u.Network })
		switch {
		case u.Cached && own || filepath.Base(u.File) == conflistName: // these are of the pods that the removal waits for
		case u.Cached:
			errs = append(errs, fmt.Errorf("%s names %s: delete its pod; remove the file if there is no such pod", u.File, u.Plugin))
		default:
			errs = append(errs, fmt.Errorf("%s names %s: name another plugin there, or remove the file after its last pod", u.File, u.Plugin))
		}
	}
	return errors.Join(errs...)
}

func (r *removal) printLines(done ...string) {
	for _, text := range done {
		fmt.Fprintln(r.out, text)
	}
}

func (r *removal) setState(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = err
}

// serveReady serves the container's readiness probe, which succeeds once the removal is complete.
func (r *removal) serveReady(ctx context.Context) (*sync.WaitGroup, error) {
	serving := &sync.WaitGroup{}
	if r.http == "" || !r.wait {
		return serving, nil
	}
	ready := func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.state
	}
	return serving, probes.Server{Ready: ready, Metrics: prometheus.NewRegistry(), Log: r.log}.Start(ctx, r.http, serving)
}

func removeRoutes() (changes int, err error) {
	host, err := kernel.Host()
	if err != nil {
		return 0, err
	}
	defer host.Close()
	return noderoutes.Remove(&host.NS)
}

// removeFile calls remove for the file and prints its path. It is a no-op if the file is missing.
func (r *removal) removeFile(path string, remove func() error) error {
	if _, err := store.ReadFile(path); err != nil {
		return nil
	}
	err := remove()
	if err == nil {
		r.printLines("removed " + path)
	}
	return err
}

func removeStatus() error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(statusName)
}
