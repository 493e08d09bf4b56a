// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/store"
)

// bootFile is the name of a file in the lease folder: the ID of the boot in which Podlace last used the folder, and the time of its first
// use in that boot, in nanoseconds since 1970. In the boot in which Podlace begins to use a folder the time is 0, because all leases may be
// of this boot. Other programs ignore the file, because its name is no address.
const bootFile = "podlace_boot"

const (
	// probeTime is how long a pod may take to answer ARP or neighbour discovery. A kernel behind the same bridge needs microseconds.
	probeTime = 300 * time.Millisecond
	// maxProbed limits the leases that one ADD probes while it holds the lock.
	maxProbed = 8
)

// markBoot brings the boot file up to date. It returns the time before which leases are of an earlier boot, or zero if none is known to be.
func (l *leases) markBoot() (since time.Time, err error) {
	since, content, err := boot(l.dir)
	if content != "" && err == nil {
		err = l.dir.Write(bootFile, []byte(content), 0o600)
	}
	if err != nil {
		return time.Time{}, err
	}
	return since, nil
}

// boot reads the boot file of a lease folder. The result content is what the file should have, or "" if it has that.
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
		return since, now + " 0\n", nil
	}
	if id != now {
		since = time.Now()
		return since, fmt.Sprintf("%s %d\n", now, since.UnixNano()), nil
	}
	if nanoseconds != 0 {
		since = time.Unix(0, nanoseconds)
	}
	return since, "", nil
}

// isEarlier reports whether a lease is of an earlier boot: it is older than this boot's first use of the folder, and no record of its
// attachment has the address. The clock may have been set back since, so this is no proof.
func (l *leases) isEarlier(is lease) bool {
	return !is.torn() && is.of.ContainerID[0] != '?' && is.written.Before(l.since) && !l.isRecorded(is)
}

// isRecorded reports whether a record has the address of a lease. Records without addresses are of an ADD that has not ended.
func (l *leases) isRecorded(is lease) bool {
	records, others := l.recordsOf(is.of), false
	for _, rec := range records {
		for _, p := range rec.Addresses() {
			if p.Addr() == is.addr {
				return true
			}
			others = true
		}
	}
	return len(records) > 0 && !others
}

// isFree reports whether the address of a lease may be taken: the lease is torn, or it is of an earlier boot and nobody answers for the
// address on this node.
func (a *allocation) isFree(is lease) bool {
	if is.torn() {
		return true
	}
	if !a.l.isEarlier(is) || a.probed == maxProbed {
		return false
	}
	a.probed++
	answers, err := a.host.Answers(is.addr, probeTime)
	if answers || err != nil {
		a.r.Log.Warn("a lease of an earlier boot keeps its address", "lease", is.addr, "answers", answers, "error", err)
		return false
	}
	a.r.Log.Warn("taking the address of a pod of an earlier boot", "lease", is.addr, "of", is.of.ContainerID, "ifname", is.of.IfName)
	return true
}

// reclaim takes an address of a full set whose lease is torn or of an earlier boot, the oldest first.
func (a *allocation) reclaim(set RangeSet) (lease, bool, error) {
	all, err := a.l.all()
	slices.SortStableFunc(all, func(a, b lease) int { return a.written.Compare(b.written) })
	for _, is := range all {
		if r, in := set.find(is.addr); in && is.addr != r.Gateway && a.isFree(is) {
			return is, true, a.takeOver(is)
		}
	}
	return lease{}, false, err
}

func (a *allocation) takeOver(is lease) error {
	if err := a.l.dir.Write(is.addr.String(), []byte(leaseContent(a.r.Attachment())), 0o600); err != nil {
		return fmt.Errorf("lease %s: %w", is.addr, err)
	}
	a.mine = append(a.mine, is.addr)
	return nil
}
