// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"fmt"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// check compares the kernel objects of the limits with the values of ADD, or those that an admin set later.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	st, recorded, err := attachment.Checked[state](r)
	if err != nil {
		return err
	}
	byAdmin := st.Asked.Ingress.ByAdmin || st.Asked.Egress.ByAdmin
	if cfg.unlimited() && !byAdmin {
		return nil
	}
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	link, err := hostSide(r, host)
	if err != nil {
		return err
	}
	want := st
	if !byAdmin && (st.Asked != cfg.Asked || st.Latency != cfg.Latency) { // the MTU may have changed since
		want = cfg.plan(attachment.KeyOf(r), link, st.hasFairQueues())
	}
	return want.check(r, host, link, recorded)
}

// check compares the limits of a state with the kernel's. recorded says whether the state comes from a record.
func (st state) check(r *plugin.Request, host *kernel.Node, link kernel.Link, recorded bool) error {
	of, err := st.observe(host, link, host.Shaped)
	if err != nil {
		return err
	}
	if st.Ingress != nil {
		if err := of.Ingress.check(host, "ingress", *st.Ingress, recorded); err != nil {
			return err
		}
	}
	if st.Egress == nil {
		return nil
	}
	if err := of.Egress.check(host, "egress", *st.Egress, recorded); err != nil {
		return err
	}
	ifb := of.Egress.link
	if err := checkFilters(host, link, kernel.Receiving, "egress", ifb.Index); err != nil {
		return err
	}
	bypass, err := bypassOf(host, link, ifb)
	if bypass != "" {
		r.Log.Warn("another program may switch the limit off", "limit", "egress", "found", bypass)
	}
	// Podlace adds its ifb device to the device group of the link, and the reference plugin does not. A device in the group is Podlace's,
	// and its record is lost.
	if err != nil || recorded || !link.LeadsGroup() || ifb.Traits.Group != link.Traits.Group {
		return err
	}
	return attachment.LostRecord(r)
}

// check compares a limit with the wanted one, and looks for filters ahead of it. Without a record it accepts what the reference plugin
// makes: another burst, another queue length, and a redirect without short frames.
func (e observedLimit) check(host *kernel.Node, limit string, want kernel.Bucket, ours bool) error {
	if e.lost != "" && (ours || !e.passesShort) {
		return plugin.Differs("%s: %s", limit, e.lost)
	}
	// The kernel stores rates in whole bytes per second, and bursts in ticks.
	has := e.bucket
	same := has.Limit == want.Limit && nearBurst(has.Burst, want.Burst, want.Rate) && nearFair(has.Fair, want.Fair)
	if has.Rate/8 != want.Rate/8 || ours && !same {
		return plugin.Differs("the token bucket of %s is %s, want %s", e.link.Name, has, want)
	}
	return checkFilters(host, e.link, kernel.Sending, limit, 0)
}

// checkFilters fails if another program's tc filter takes or drops all frames before they reach the limit. own is the ifindex to which the
// limit's own filter redirects, or 0. Podlace never removes the other filter, because its program may need it.
func checkFilters(host *kernel.Node, link kernel.Link, side kernel.Side, limit string, own int) error {
	captor, ok, err := host.Captor(link, side)
	if err != nil || !ok || !captor.Drops && captor.To == own {
		return err
	}
	does := "takes all frames before the limit sees them"
	if captor.Drops {
		does = "drops all frames"
	}
	return plugin.WithHint(plugin.Differs("%s: a filter of another program on %s (%s) %s: %s",
		limit, link.Name, side, does, captor.Filter),
		"find it with 'tc filter show dev %s %s', and remove it with 'tc filter del'; 'podlace reload' leaves it", link.Name, side)
}

// bypassOf describes another program's filter that takes the pod's frames, or may take them, before they are redirected to the ifb device
// of its egress limit, or returns "".
func bypassOf(host *kernel.Node, link, ifb kernel.Link) (string, error) {
	captor, ok, err := host.Captor(link, kernel.Receiving)
	if err == nil && ok && captor.To != ifb.Index {
		return fmt.Sprintf("a filter on %s takes all frames before the limit sees them: %s", link.Name, captor.Filter), nil
	}
	program, e := host.ProgramAhead(link)
	if err = errors.Join(err, e); program == "" || err != nil {
		return "", err
	}
	return fmt.Sprintf("a BPF filter on %s sees all frames first, and those that it accepts pass without a limit: %s", link.Name, program), nil
}

// nearBurst reports whether two bursts are equal, except for the kernel's rounding to ticks of 64 ns.
func nearBurst(a, b uint32, rate uint64) bool {
	difference := uint64(max(a, b) - min(a, b))
	return difference <= uint64(max(a, b))/50+64+rate/8*64/1e9
}

// nearFair reports whether two fair queues are equal, except for the kernel's rounding of times.
func nearFair(a, b kernel.FairQueue) bool {
	const unit = 2 * time.Microsecond
	return a.Packets == b.Packets && (a.Target-b.Target).Abs() <= unit && (a.Interval-b.Interval).Abs() <= unit
}
