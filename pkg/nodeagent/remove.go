// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/noderoutes"
	"github.com/podlace/podlace/pkg/probes"
	"github.com/podlace/podlace/pkg/reconcile"
	"github.com/podlace/podlace/pkg/store"
)

const (
	removeWait = 30 * time.Second // for the end of the agent
	removePoll = 2 * time.Second  // between looks at the pods that remain
)

// removal takes back what the agent and the plugins did on this node. First no new pod starts on Podlace: another network takes over, or
// node.json goes, without which ADD fails. The conflist, the routes and the plugins stay while a pod needs them for its packets and its
// DEL. Then the rest goes.
type removal struct {
	binDir, confDir string // empty: the agent did not write there
	config          string // the agent's configuration: the conflist lies beside it
	http            string // where /readyz says whether all is removed; empty: nowhere
	wait            bool   // for pods, and at the end for SIGTERM
	poll            time.Duration
	out             io.Writer
	log             *slog.Logger

	known []reconcile.Network
	told  string // what was printed last of the pods that remain

	mu    sync.Mutex
	state error // nil: all is removed
}

// run does all. A step that fails does not keep the others from being done.
func (r *removal) run(ctx context.Context) error {
	locking, cancel := context.WithTimeout(ctx, removeWait)
	defer cancel()
	unlock, err := lockNode(locking, r.log)
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("podlace-node runs on this node, and would bring all back: delete its DaemonSet or stop its service first")
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := r.checkFolder(); err != nil {
		return err
	}
	r.networks()
	r.setState(errors.New("the removal has just begun"))
	ctx, stop := context.WithCancel(ctx)
	serving, err := r.serve(ctx)
	defer func() { stop(); serving.Wait() }()
	if err != nil {
		return err
	}
	if err := r.awaitPods(ctx); err != nil {
		return err
	}
	if err := r.finish(); err != nil {
		return err
	}
	r.setState(nil)
	if r.wait {
		r.say("done: nothing of Podlace is left on this node; waiting for the end of the container")
		<-ctx.Done()
	}
	return nil
}

// awaitPods stops new pods and returns once no pod needs Podlace. Without wait it looks once.
func (r *removal) awaitPods(ctx context.Context) error {
	for {
		err := r.stopNew()
		remain, notes, podErr := r.remaining()
		if err = errors.Join(err, podErr); err == nil && len(remain) > 0 {
			err = fmt.Errorf("pods that still need Podlace, so that it stays: %s (%d); delete them, or replace them by pods of another network",
				strings.Join(remain, ", "), len(remain))
		}
		if err == nil {
			return nil
		}
		r.setState(err)
		text := strings.Join(append(notes, err.Error()), "\n")
		if !r.wait {
			r.say(notes...)
			return fmt.Errorf("%w; then remove again", err)
		}
		if text != r.told {
			r.told = text
			r.say(text)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(r.poll):
		}
	}
}

// stopNew keeps new pods from Podlace. The conflist goes as soon as another network is there: a runtime without any cannot end pods.
func (r *removal) stopNew() error {
	var errs []error
	if r.confDir != "" {
		done, err := putBack(r.confDir, r.binDir)
		r.say(done...)
		next, readErr := successor(r.confDir)
		errs = append(errs, err, readErr)
		if next != "" {
			errs = append(errs, r.dropConflist(", as "+filepath.Join(r.confDir, next)+" is there"))
		}
	}
	return errors.Join(append(errs, r.drop(nodefile.Path, nodefile.Remove))...)
}

func (r *removal) dropConflist(why string) error {
	removed, err := removeConflist(r.confDir)
	if removed {
		r.say("removed " + filepath.Join(r.confDir, conflistName) + why)
	}
	return err
}

// finish removes what no pod needs any more.
func (r *removal) finish() error {
	var errs []error
	networks := r.networks()
	if r.confDir != "" {
		errs = append(errs, r.dropConflist(""))
	}
	changes, err := removeRoutes()
	if changes > 0 {
		r.say(fmt.Sprintf("removed routes, nexthops and the tunnel: %d changes", changes))
	}
	errs = append(errs, err, r.drop(store.Root+"/"+statusName, removeStatus))
	if r.binDir == "" {
		return errors.Join(errs...)
	}
	errs = append(errs, r.leftovers(networks))
	done, err := removePrograms(r.binDir)
	r.say(done...)
	return errors.Join(append(errs, err)...)
}

// say prints lines.
func (r *removal) say(done ...string) {
	for _, text := range done {
		fmt.Fprintln(r.out, text)
	}
}

func (r *removal) setState(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = err
}

// serve answers the readiness probe of the container: it succeeds once all is removed.
func (r *removal) serve(ctx context.Context) (*sync.WaitGroup, error) {
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

// drop removes a file and says so, if it was there.
func (r *removal) drop(path string, remove func() error) error {
	if _, err := store.ReadFile(path); err != nil {
		return nil
	}
	err := remove()
	if err == nil {
		r.say("removed " + path)
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
