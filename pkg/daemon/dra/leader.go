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
	// leaderLock is the name of the lock file in the parent folder of the claim records. The instance that holds this lock is the leader, and
	// writes its name into the file.
	leaderLock = "leader.lock"
	// leadInterval is the pause between two attempts of a follower to take the leader lock.
	leadInterval = 500 * time.Millisecond
)

// The type leadership stores whether this instance of the daemon is the leader. Only the leader publishes devices, collects claim records
// and writes the status of claims. In contrast, every instance prepares claims.
type leadership struct {
	mu         sync.Mutex
	leads      bool
	whyWaiting string      // why this instance does not serve the kubelet now, or ""
	changed    broadcaster // wakes waiters after a change of leads or waits
}

// isLeader reports whether this instance is the leader.
func (d *Driver) isLeader() bool {
	d.lead.mu.Lock()
	defer d.lead.mu.Unlock()
	return d.lead.leads
}

// Leads reports whether this instance is the leader. Only the leader publishes devices, changes PFs and drivers, and restores VFs. Another
// instance on the node may be the leader, for example an older version during an update.
func (d *Driver) Leads() bool { return d.isLeader() }

// whyNotServing returns the reason why this instance does not serve the kubelet at the moment. whyNotServing returns "" if this instance
// serves the kubelet.
func (l *leadership) whyNotServing() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.whyWaiting
}

// setFollower stores that another instance is the leader. The argument `leader` is "" if an error prevents this instance from becoming the
// leader. During an update, several instances that run in pods may serve the kubelet at the same time. An instance that runs as a service
// must be the only instance, because any other instance would take over the service's connection to the kubelet.
func (l *leadership) setFollower(d *Driver, leader string, err error) {
	waits := ""
	if d.options.Instance == "" || strings.HasPrefix(leader, servicePrefix) {
		waits = leader + " serves the claims of this node; this instance waits for its end; run the daemon as a service or as a DaemonSet, not both"
		if leader == "" {
			waits = fmt.Sprintf("cannot determine the leading instance: %v", err)
		}
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

// holdLead takes the leader lock and holds it until ctx is done. When the process ends, the kernel releases the lock.
func (l *leadership) holdLead(ctx context.Context, d *Driver) {
	logged := ""
	for ctx.Err() == nil {
		lock, dir, leader, err := d.takeLead()
		if err == nil {
			l.set(d, true)
			d.options.Log.Info("this instance leads: it publishes devices and writes the status of claims", "instance", d.instanceName())
			d.removeStaleSockets()
			l.waitUntilLost(ctx, lock)
			l.set(d, false)
			lock.Unlock()
			dir.Close()
			continue
		}
		l.setFollower(d, leader, err)
		if err.Error() != logged && leader == "" {
			d.options.Log.Error("this instance cannot lead; retrying", "instance", d.instanceName(), "error", err, "waits", l.whyNotServing())
		} else if err.Error() != logged {
			d.options.Log.Info("another instance leads", "instance", d.instanceName(), "error", err, "waits", l.whyNotServing())
		}
		logged = err.Error()
		select {
		case <-ctx.Done():
		case <-time.After(leadInterval):
		}
	}
}

// whileLeading calls f() each time this instance becomes the leader, until ctx is done. The context of f() ends when this instance stops
// being the leader.
func (d *Driver) whileLeading(ctx context.Context, f func(context.Context)) {
	for ctx.Err() == nil {
		turn := d.lead.changed.nextSend()
		if d.isLeader() {
			lead, lost := context.WithCancel(ctx)
			go func() {
				defer lost()
				for turn := turn; d.isLeader(); turn = d.lead.changed.nextSend() {
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

// waitUntilLost returns when ctx is done, or when another program has replaced the lock file.
func (l *leadership) waitUntilLost(ctx context.Context, lock *store.Lock) {
	for !lock.Lost() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(checkInterval):
		}
	}
}

// takeLead takes the leader lock if no other instance holds it. If another instance holds the lock, takeLead returns an error and the name
// of that instance. After any other error, takeLead returns "" as the name. The caller must first release the lock and then close the
// folder.
func (d *Driver) takeLead() (lock *store.Lock, dir *store.Dir, leader string, err error) {
	dir, err = store.Make(filepath.Dir(d.options.Claims), 0o755)
	if err != nil {
		return nil, nil, "", err
	}
	lock, err = dir.Lock(0, leaderLock, 0o600)
	var busy interface{ Busy() bool }
	if err != nil && !errors.As(err, &busy) {
		dir.Close()
		return nil, nil, "", err
	}
	if err != nil {
		by, _ := dir.Read(leaderLock)
		leader = cmp.Or(strings.TrimSpace(string(by)), "another instance")
		dir.Close()
		return nil, nil, leader, fmt.Errorf("%s is the leader: %w", leader, err)
	}
	// The spaces cover the rest of an earlier leader's name.
	if _, err := lock.File().WriteAt(fmt.Appendf(nil, "%-100s\n", d.instanceName()), 0); err != nil {
		lock.Unlock()
		dir.Close()
		return nil, nil, "", err
	}
	return lock, dir, "", nil
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

// awaitTurn waits until this instance may serve the kubelet.
func (d *Driver) awaitTurn(ctx context.Context) error {
	for {
		turn := d.lead.changed.nextSend()
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

// The type broadcaster wakes all goroutines that wait for an event.
type broadcaster struct {
	mu   sync.Mutex
	next chan struct{} // closed by the next send
}

// nextSend returns a channel that the next call of send() closes.
func (b *broadcaster) nextSend() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	return b.next
}

func (b *broadcaster) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next != nil {
		close(b.next)
	}
	b.next = make(chan struct{})
}
