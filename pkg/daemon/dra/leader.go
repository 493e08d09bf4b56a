// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/store"
)

const (
	// leaderLock is the lock file in the parent folder of the claim records. The leader holds it and writes its name into it.
	leaderLock = "leader.lock"
	// leadInterval is the pause between two attempts of a follower to take the leader lock.
	leadInterval = 500 * time.Millisecond
)

// Leads reports whether this instance is the leader. Every instance prepares claims, but only the leader publishes devices, collects
// claim records, writes the status of claims, changes PFs and drivers, and restores VFs. Another instance may lead, such as an older
// version during an update.
func (d *Driver) Leads() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leads
}

func (d *Driver) setLead(leads bool, whyWaiting string) {
	d.change(func() { d.leads, d.whyWaiting = leads, whyWaiting })
	d.count.leading.Set(map[bool]float64{true: 1}[leads])
}

// holdLead runs the leader's tasks while this instance holds the leader lock. It returns when ctx is done.
func (d *Driver) holdLead(ctx context.Context, tasks ...func(context.Context)) {
	for ctx.Err() == nil {
		leader, err := d.tryLead(ctx, tasks)
		if err == nil {
			continue
		}
		if level, text := slog.LevelInfo, "another instance leads"; d.failures.isDue("lead", err, time.Now()) {
			waits := d.whyWait(leader, err)
			d.setLead(false, waits)
			if leader == "" {
				level, text = slog.LevelError, "this instance cannot lead; retrying"
			}
			d.options.Log.Log(ctx, level, text, "instance", d.instanceName(), "error", err, "waits", waits)
		}
		select {
		case <-ctx.Done():
		case <-time.After(leadInterval):
		}
	}
}

// tryLead takes the leader lock and runs the tasks until ctx is done or another program has replaced the lock file. Without the lock,
// it returns at once, with the name of the leader if there is one. The kernel releases the lock when the process ends.
func (d *Driver) tryLead(ctx context.Context, tasks []func(context.Context)) (leader string, err error) {
	dir, err := store.Make(filepath.Dir(d.options.Claims), 0o755)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	lock, err := dir.Lock(0, leaderLock, 0o600)
	var busy interface{ Busy() bool }
	if errors.As(err, &busy) {
		by, _ := dir.Read(leaderLock)
		leader = cmp.Or(strings.TrimSpace(string(by)), "another instance")
		return leader, fmt.Errorf("%s is the leader: %w", leader, err)
	}
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	// The spaces cover the rest of an earlier leader's name.
	if _, err := lock.File().WriteAt(fmt.Appendf(nil, "%-100s\n", d.instanceName()), 0); err != nil {
		return "", err
	}
	d.failures.isDue("lead", nil, time.Now())
	d.lead(ctx, lock, tasks)
	return "", nil
}

// lead runs the tasks of the leader until ctx is done or the lock is lost, and waits until they have ended.
func (d *Driver) lead(ctx context.Context, lock *store.Lock, tasks []func(context.Context)) {
	d.setLead(true, "")
	d.options.Log.Info("this instance leads: it publishes devices and writes the status of claims", "instance", d.instanceName())
	d.recordsChanged() // the daemon may change devices from now on
	d.removeStaleSockets()
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, task := range tasks {
		running.Go(func() { task(ctx) })
	}
	for !lock.Lost() && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(checkInterval):
		}
	}
	d.setLead(false, "") // first, because another instance may lead when the lock is lost, and the tasks may need time to end
}

// whyWait returns why this instance must not serve the kubelet. leader is "" if an error keeps this instance from leading. Several
// instances in pods may serve it during an update, but one that runs as a service must be alone, because another would take over its
// connection to the kubelet.
func (d *Driver) whyWait(leader string, err error) string {
	switch {
	case d.options.Instance != "" && !strings.HasPrefix(leader, servicePrefix):
		return ""
	case leader == "":
		return fmt.Sprintf("cannot determine the leading instance: %v", err)
	}
	return leader + " serves the claims of this node; this instance waits for its end; run the daemon as a service or as a DaemonSet, not both"
}

// servicePrefix is the beginning of an instance's name if the instance runs as a service and not in a pod.
const servicePrefix = "the service"

// instanceName returns a name for this instance of the daemon, which other instances use in their messages.
func (d *Driver) instanceName() string {
	if d.options.Instance != "" {
		return fmt.Sprintf("the pod with UID %s (process %d)", d.options.Instance, os.Getpid())
	}
	return fmt.Sprintf("%s with process %d", servicePrefix, os.Getpid())
}
