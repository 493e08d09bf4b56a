// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// checksSources reports whether the configuration requires spoof protection.
func (c Config) checksSources() bool { return c.MACSpoofCheck || c.AntiSpoof }

// guardOf returns the guard that the configuration requires for a pod's port, or nil if it requires neither spoof protection nor hairpin
// mode.
func (c Config) guardOf(host, pod kernel.Link, l layer3, owner string) *Guard {
	if !c.checksSources() && !c.Hairpin {
		return nil
	}
	g := &Guard{Link: host.Name, MAC: pod.MAC.String(), Owner: owner, Hairpin: c.Hairpin, AnySource: !c.checksSources()}
	if c.AntiSpoof {
		for _, a := range l.Addresses {
			g.Addresses = append(g.Addresses, a.Addr())
		}
	}
	return g
}

// bridges is the name of the lock for writing guards (spoof protection rules) of any network, or the MTU of a bridge.
const bridges = "bridges"

// applyGuard sets up the port's spoof protection before the port is up, so that other pods are always protected from this one. It restores
// flushed rules of all networks, even if this pod needs no guard.
func (j *job) applyGuard(port kernel.Link, g *Guard) error {
	j.restoreFlushed()
	if g == nil {
		return nil
	}
	if g.checksSources() {
		if err := j.host.SetReserved(port); err != nil {
			return err
		}
	}
	err := compareGuards(j.host)
	if plugin.IsDifferent(err) {
		return restoreGuards(j.host, j.r.Log, attachment.Waiting, *g)
	}
	if err != nil {
		return err
	}
	if err := noteTable(nft.GuardTable); err != nil {
		return err
	}
	return ensureGuard(j.host, *g)
}

// restoreGuards writes all rules and guards if the kernel lacks a rule of the guard table, a recorded guard, or one of the guards in more.
func restoreGuards(host *kernel.Node, log *slog.Logger, locks attachment.Locker, more ...Guard) error {
	unlock, err := locks.Node(bridges)
	if err != nil {
		return locks.Tolerate(err)
	}
	defer unlock()
	if len(more) == 1 && compareGuards(host) == nil { // another ADD wrote the rules while this one waited for the lock
		return ensureGuard(host, more[0])
	}
	pods, err := attachment.States[state](attachment.AllOf("bridge"))
	if err != nil {
		return err
	}
	all, written := append(guardsOf(pods), more...), guardsOf(finished(pods))
	if len(all) == 0 {
		return forgetFlushed(host, guardSchema())
	}
	if len(written)+len(more) == 0 {
		return nil
	}
	if err := cmp.Or(guardDrift(host), compareGuards(host, slices.Concat(written, more)...)); !plugin.IsDifferent(err) {
		return err
	}
	if len(written) > 0 {
		log.Info("guards are missing and are restored from the records", "attachments", len(written))
	}
	if err := noteTable(nft.GuardTable); err != nil {
		return err
	}
	return SetGuards(all)
}

func guardsOf(pods []attachment.Of[state]) (all []Guard) {
	for _, pod := range pods {
		if pod.State.Guard != nil {
			all = append(all, *pod.State.Guard)
		}
	}
	return all
}

// removeGuard removes the guard from the kernel, and from the record so that a concurrent rewrite of all guards does not restore it.
func removeGuard(host *kernel.Node, att *attachment.Attachment, st *state) error {
	if st.Guard == nil {
		return nil
	}
	unlock, err := attachment.Waiting.Node(bridges)
	if err != nil {
		return err
	}
	defer unlock()
	if err := delGuard(host, *st.Guard); err != nil {
		return err
	}
	st.Guard = nil
	att.SaveProgress(*st)
	return nil
}

// checkRecordedGuard compares the guard of the port's ADD with the kernel's. It only warns of rules of another version, because a change of
// the version must not end running pods, and of missing ones on a port without spoof protection.
func (j *job) checkRecordedGuard(port kernel.Link, had Guard) error {
	err := guardDrift(j.host)
	if err == nil {
		err = compareGuards(j.host, had)
	}
	if plugin.IsDifferent(err) {
		if other, e := guardSchema().OfAnotherVersion(&j.host.NFT); e == nil && (other || had.AnySource) {
			j.r.Log.Warn("STATUS, the next ADD and 'podlace reload' bring the rules of the port up to date", "port", had.Link, "error", err)
			return nil
		}
	}
	if err == nil && !had.AnySource && !port.Reserved {
		err = plugin.Differs("port %s: frames to reserved addresses bypass the guard, group_fwd_mask is missing", port.Name)
	}
	if plugin.IsDifferent(err) {
		err = plugin.WithHint(err, "'podlace reload' and GC bring it back")
	}
	return err
}

// checkGuard compares the recorded guard with the kernel's. Less protection than configured is only logged, because an error could make the
// runtime replace the pod: a pod keeps the protection of its ADD, and one without a record may be the reference plugin's.
func (j *job) checkGuard(port kernel.Link, wanted *Guard) error {
	if had := j.recordedState.Guard; had != nil {
		err := j.checkRecordedGuard(port, *had)
		if err != nil || !wanted.checksSources() || had.checksSources() && len(had.Addresses) >= len(wanted.Addresses) {
			return err
		}
	}
	if !wanted.checksSources() {
		return nil
	}
	if !j.hasRecord && !j.cfg.AntiSpoof {
		if ok, err := asReference(j.att.Key).HasSpoofCheck(); ok || err != nil {
			return err
		}
	}
	if err := compareGuards(j.host, *wanted); !plugin.IsDifferent(err) {
		return err
	}
	j.r.Log.Warn("the pod lacks the configured spoof protection; recreate the pod to add it")
	return nil
}
