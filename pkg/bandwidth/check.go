// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// check compares each piece with what ADD would make, or with what an admin has made of it since.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	st, recorded := attachment.StateOf[state](attachment.KeyOf(r), pluginName)
	byAdmin := st.Asked.Ingress.ByAdmin || st.Asked.Egress.ByAdmin
	if cfg.none() && !byAdmin {
		return nil
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	link, err := hostSide(r, host)
	if err != nil {
		return err
	}
	want := st
	if !byAdmin && (st.Asked != cfg.Asked || st.Latency != cfg.Latency) { // the MTU may have changed since
		want = cfg.plan(attachment.KeyOf(r), link, st.fair())
	}
	if want.Ingress != nil {
		if err := checkShaper(host, link, *want.Ingress, recorded); err != nil {
			return err
		}
	}
	if want.Egress == nil {
		return nil
	}
	ifb, err := redirectedTo(host, link, want.IFB, recorded)
	if err != nil {
		return err
	}
	return checkShaper(host, ifb, *want.Egress, recorded)
}

// redirectedTo returns the device of an egress limit, to which the link must be redirected. Without a record the reference made the redirect,
// which lets short frames pass until reload replaces it.
func redirectedTo(host *kernel.Node, link kernel.Link, name string, ours bool) (kernel.Link, error) {
	ifb, ok, err := device(host, name)
	if err != nil {
		return ifb, err
	}
	if !ok || !ifb.Up {
		return ifb, plugin.Errorf(plugin.CodeStateDiffers, "egress: device %s is missing or down", name)
	}
	have, err := host.Redirected(link, ifb)
	switch {
	case err != nil:
	case have == kernel.RedirectsNone:
		err = plugin.Errorf(plugin.CodeStateDiffers, "egress: the redirect from %s to %s is missing", link.Name, ifb.Name)
	case have == kernel.RedirectsLong && ours:
		err = plugin.WithHint(plugin.Errorf(plugin.CodeStateDiffers, "egress: the redirect from %s to %s lets frames shorter than 18 bytes pass the limit", link.Name, ifb.Name),
			"an earlier version made the redirect; podlace reload replaces it")
	}
	return ifb, err
}

// checkShaper compares the token bucket of a link. Without a record the reference made it, which computes burst and queue in another way.
func checkShaper(host *kernel.Node, link kernel.Link, want kernel.Shaper, ours bool) error {
	has, ok, err := host.Shaped(link)
	if err != nil {
		return err
	}
	if !ok {
		return noBucket(link)
	}
	// The kernel counts whole bytes per second, and bursts in ticks.
	same := has.Limit == want.Limit && near(has.Burst, want.Burst, want.Rate) && nearFair(has.Fair, want.Fair)
	if has.Rate/8 != want.Rate/8 || ours && !same {
		return plugin.Errorf(plugin.CodeStateDiffers, "the token bucket of %s is %s, want %s", link.Name, has, want)
	}
	return nil
}

func noBucket(link kernel.Link) error {
	return plugin.Errorf(plugin.CodeStateDiffers, "the token bucket of %s is missing", link.Name)
}

// near allows for the rounding of a burst to ticks of 64 ns at its rate.
func near(a, b uint32, rate uint64) bool {
	difference := uint64(max(a, b) - min(a, b))
	return difference <= uint64(max(a, b))/50+64+rate/8*64/1e9
}

// nearFair allows for the units in which the kernel keeps times.
func nearFair(a, b kernel.FairQueue) bool {
	const unit = 2 * time.Microsecond
	return a.Packets == b.Packets && (a.Target-b.Target).Abs() <= unit && (a.Interval-b.Interval).Abs() <= unit
}
