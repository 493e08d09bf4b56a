// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/store"
)

// bootFile is a file in the lease folder with the ID of the boot in which Podlace last used the folder, and the time of its first use in
// that boot, in nanoseconds since 1970. The time is 0 in the boot in which Podlace begins to use a folder, because all leases may be of
// this boot. Other programs ignore the file, because its name is no address.
const bootFile = "podlace_boot"

const (
	// probeTime is how long a pod may take to answer ARP or neighbour discovery. A kernel behind the same bridge needs microseconds.
	probeTime = 300 * time.Millisecond
	// maxProbed limits the leases that one ADD probes, because the kernel's neighbour tables are limited.
	maxProbed = 128
)

// markBoot sets l.since and updates the boot file. A missing file means that the folder may have been emptied, so markBoot restores the
// leases of live pods. It writes the file last, and only once no lease is missing, so that otherwise the next ADD or STATUS continues.
func (l *leases) markBoot() error {
	since, content, err := boot(l.dir)
	if err != nil {
		l.log.Warn("could not tell which leases are of an earlier boot: their addresses stay taken", "error", err)
		return nil
	}
	l.since = since
	if strings.HasSuffix(content, takenOver) {
		err = l.restore()
	}
	if content == "" || err != nil || len(l.reserved)+len(l.unread) > 0 {
		return err
	}
	return l.dir.Write(bootFile, []byte(content), 0o600)
}

// takenOver ends the content of the boot file in the boot in which Podlace begins to use the folder.
const takenOver = " 0\n"

// boot reads the boot file of a lease folder. content is what the file should have, or "" if it is up to date.
func boot(dir *store.Dir) (since time.Time, content string, err error) {
	data, err := store.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return since, "", err
	}
	now := strings.TrimSpace(string(data))
	if data, err = dir.Read(bootFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return since, "", err
	}
	var id string
	var nanoseconds int64
	if _, err := fmt.Sscanf(string(data), "%s %d", &id, &nanoseconds); err != nil {
		return since, now + takenOver, nil
	}
	if id != now {
		since = time.Now()
		content = fmt.Sprintf("%s %d\n", now, since.UnixNano())
	} else if nanoseconds != 0 {
		since = time.Unix(0, nanoseconds)
	}
	// The reference plugin may have used the folder earlier in this boot.
	if up := (unix.Timespec{}); !since.IsZero() && unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) == nil {
		if booted := time.Now().Add(-time.Duration(up.Nano())); booted.Before(since) {
			since = booted
		}
	}
	return since, content, nil
}

// isEarlier reports whether a lease is of an earlier boot: older than this boot and than Podlace's first use of the folder in it, with no
// record of its attachment that has the address. It is no proof, because the clock may have been set since.
func (l *leases) isEarlier(is lease) bool {
	return !is.torn() && is.of.ContainerID[0] != '?' && is.written.Before(l.since) && !l.isRecorded(is)
}

// isRecorded reports whether a record has the address of a lease. Records without addresses are of an ADD that has not ended.
func (l *leases) isRecorded(is lease) bool {
	records, others := l.recordsOf(is.of), false
	for _, rec := range records {
		for _, addresses := range rec.Addresses() {
			if slices.ContainsFunc(addresses, func(p netip.Prefix) bool { return p.Addr() == is.addr }) {
				return true
			}
			others = others || len(addresses) > 0
		}
	}
	return (len(records) > 0 || l.unsure) && !others
}

// isReusable reports whether reclaim should probe the address of a lease: it is one of the set, and torn or of an earlier boot.
func (l *leases) isReusable(set RangeSet, is lease) bool {
	r, in := set.find(is.addr)
	return in && is.addr != r.Gateway && (is.torn() || l.isEarlier(is))
}

// reclaim takes a leased address of a set, the oldest first, if the lease is torn or of an earlier boot, the address has no route of its
// own and no lease in another network of the bridge, and no host answers for it. Other leases of an earlier boot whose address stays silent
// are deleted, so the next ADD needs no probe.
func (a *allocation) reclaim(set RangeSet, all []lease) (got netip.Addr, ok bool, err error) {
	candidates := map[netip.Addr]lease{}
	for _, is := range all {
		if is.torn() || is.written.Before(a.l.since) {
			candidates[is.addr] = is
		}
	}
	byTime := func(x, y netip.Addr) int { return candidates[x].written.Compare(candidates[y].written) }
	var old []netip.Addr
	for _, addr := range slices.SortedFunc(maps.Keys(candidates), byTime) {
		is := candidates[addr]
		if len(old) == maxProbed && !is.torn() || !a.l.isReusable(set, is) || a.leasedBeside(is.addr) != "" || a.isForeign(is.addr) {
			continue
		}
		if is.torn() {
			return is.addr, true, a.takeOver(is.addr)
		}
		old = append(old, is.addr)
	}
	if len(old) == 0 {
		return got, false, nil
	}
	silent, err := a.host.Silent(old, probeTime)
	a.r.Log.Warn("taking addresses of pods of an earlier boot", "leases", len(old), "silent", silent)
	if len(silent) == 0 || err != nil {
		return got, false, err
	}
	for _, addr := range silent[1:] {
		err = errors.Join(err, a.l.dir.Remove(addr.String()))
	}
	return silent[0], true, errors.Join(err, a.takeOver(silent[0]))
}

func (a *allocation) takeOver(addr netip.Addr) error {
	if err := a.l.dir.Write(addr.String(), []byte(leaseContent(a.r.Attachment())), 0o600); err != nil {
		return fmt.Errorf("lease %s: %w", addr, err)
	}
	a.mine = append(a.mine, addr)
	return nil
}
