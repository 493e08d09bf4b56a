// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/store"
)

const (
	// leaderLock is the lock file beside the folder of records. The instance that holds the lock leads.
	leaderLock = "leader.lock"
	// leaderFile contains the name of the leading instance.
	leaderFile = "leader"
	// leadInterval is the interval at which the other instances try to take the lock.
	leadInterval = 500 * time.Millisecond
)

// leadership is the role of this instance. Only the leading instance publishes devices, collects records and writes the status of claims.
// Every instance prepares claims.
type leadership struct {
	mu         sync.Mutex
	leads      bool
	whyWaiting string    // why this instance does not serve the kubelet now, or ""
	changed    broadcast // wakes waiters after a change of leads or waits
}

// leads reports whether this instance leads.
func (d *Driver) leads() bool {
	d.lead.mu.Lock()
	defer d.lead.mu.Unlock()
	return d.lead.leads
}

// Leads reports whether this instance leads. Only the leading instance publishes devices, changes PFs and drivers, and restores VFs.
// Another instance may be a newer one that is about to take over.
func (d *Driver) Leads() bool { return d.leads() }

// whyNotServing returns why this instance does not serve the kubelet now, or "" if it does.
func (l *leadership) whyNotServing() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.whyWaiting
}

// setFollower records that another instance leads. Instances that are pods serve side by side during an update. A service must be alone: a
// second service, or a service beside pods, would take over the kubelet's connection.
func (l *leadership) setFollower(d *Driver, leader string) {
	waits := ""
	if d.options.Instance == "" || strings.HasPrefix(leader, service) {
		waits = leader + " serves the claims of this node; this instance waits for its end; run the daemon as a service or as a DaemonSet, not both"
	}
	l.mu.Lock()
	changed := l.whyWaiting != waits
	l.whyWaiting = waits
	l.mu.Unlock()
	if changed {
		l.changed.send()
	}
}

func (l *leadership) set(d *Driver, leads bool) {
	l.mu.Lock()
	if l.leads = leads; leads {
		l.whyWaiting = ""
	}
	l.mu.Unlock()
	l.changed.send()
	if d.count.leading.Set(0); !leads {
		d.count.unattached.Set(0)
		return
	}
	d.count.leading.Set(1)
	d.recordsChanged() // the daemon may change devices from now on
}

// holdLead takes the lock and keeps it until ctx is done. The kernel releases the lock with the process.
func (l *leadership) holdLead(ctx context.Context, d *Driver) {
	logged := ""
	for ctx.Err() == nil {
		lock, dir, leader, err := d.takeLead()
		if err == nil {
			l.set(d, true)
			d.options.Log.Info("this instance leads: it publishes devices and writes the status of claims", "instance", d.name())
			d.removeStaleSockets()
			l.waitUntilLost(ctx, lock)
			l.set(d, false)
			lock.Unlock()
			dir.Close()
			continue
		}
		l.setFollower(d, leader)
		if err.Error() != logged {
			d.options.Log.Info("another instance leads", "instance", d.name(), "error", err, "waits", l.whyNotServing())
		}
		logged = err.Error()
		select {
		case <-ctx.Done():
		case <-time.After(leadInterval):
		}
	}
}

// whileLeading calls f each time that this instance becomes the leader, until ctx is done. The context of f ends when the instance loses
// the lead.
func (d *Driver) whileLeading(ctx context.Context, f func(context.Context)) {
	for ctx.Err() == nil {
		turn := d.lead.changed.wait()
		if d.leads() {
			lead, lost := context.WithCancel(ctx)
			go func() {
				defer lost()
				for turn := turn; d.leads(); turn = d.lead.changed.wait() {
					select {
					case <-lead.Done():
						return
					case <-turn:
					}
				}
			}()
			f(lead)
			lost()
			continue
		}
		select {
		case <-ctx.Done():
		case <-turn:
		}
	}
}

// waitUntilLost returns when ctx is done or the lock file has been replaced.
func (l *leadership) waitUntilLost(ctx context.Context, lock *store.Lock) {
	for !lock.Lost() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(checkInterval):
		}
	}
}

// takeLead takes the lock if it is free. Otherwise it returns the name of the leading instance with the error. The caller must release
// the lock before it closes the folder.
func (d *Driver) takeLead() (lock *store.Lock, dir *store.Dir, leader string, err error) {
	dir, err = store.Make(filepath.Dir(d.options.Claims), 0o755)
	if err != nil {
		return nil, nil, "", err
	}
	lock, err = dir.LockWithin(0, leaderLock, 0o600)
	if err != nil {
		by, _ := dir.Read(leaderFile)
		leader = cmp.Or(strings.TrimSpace(string(by)), "another instance")
		dir.Close()
		return nil, nil, leader, fmt.Errorf("%s is the leader: %w", leader, err)
	}
	if err := dir.Write(leaderFile, []byte(d.name()+"\n"), 0o600); err != nil {
		lock.Unlock()
		dir.Close()
		return nil, nil, "", err
	}
	return lock, dir, "", nil
}

// service is the prefix of the name of an instance outside of a pod.
const service = "the service"

// name returns the name of this instance for messages.
func (d *Driver) name() string {
	if d.options.Instance != "" {
		return fmt.Sprintf("the pod with UID %s (process %d)", d.options.Instance, os.Getpid())
	}
	return fmt.Sprintf("%s with process %d", service, os.Getpid())
}

// awaitTurn returns when this instance may serve the kubelet.
func (d *Driver) awaitTurn(ctx context.Context) error {
	for {
		turn := d.lead.changed.wait()
		why := d.lead.whyNotServing()
		if why == "" {
			return nil
		}
		d.conn.setDown(errors.New(why))
		select {
		case <-ctx.Done():
			return nil
		case <-turn:
		}
	}
}

// broadcast wakes all waiting goroutines.
type broadcast struct {
	mu   sync.Mutex
	next chan struct{} // closed by the next send
}

// wait returns a channel that the next send closes.
func (b *broadcast) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	return b.next
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next != nil {
		close(b.next)
	}
	b.next = make(chan struct{})
}
