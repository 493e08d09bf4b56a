// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"fmt"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// check() compares the kernel objects of the limits with the wanted values. The wanted values are the values of ADD, or the values that an
// admin set later.
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
	if want.Ingress != nil {
		if err := checkBucket(host, link, *want.Ingress, recorded); err != nil {
			return err
		}
		if err := checkSending(host, link, "ingress"); err != nil {
			return err
		}
	}
	if want.Egress == nil {
		return nil
	}
	if err := checkEgress(host, link, want, recorded); err != nil || recorded {
		return err
	}
	// Podlace adds its ifb device to the device group of the link, and the reference plugin does not. If the ifb device is in this group,
	// Podlace set the limits, and the record is lost.
	if ifb, ok, err := device(host, want.IFB); err != nil || !ok || !link.LeadsGroup() || ifb.Traits.Group != link.Traits.Group {
		return err
	}
	return attachment.LostRecord(r)
}

// checkSending returns an error if a tc filter drops or redirects all frames of a link before the frames reach the link's token bucket.
func checkSending(host *kernel.Node, link kernel.Link, limit string) error {
	captor, ok, err := host.Captor(link, kernel.Sending)
	if err != nil || !ok || !captor.Drops && captor.To == 0 {
		return err
	}
	return captureError(link, kernel.Sending, limit, captor)
}

// captureError returns an error that describes another program's tc filter. No CNI operation of Podlace removes this filter, because the
// other program may need it.
func captureError(link kernel.Link, side kernel.Side, limit string, captor kernel.Captor) error {
	does := "takes all frames before the limit sees them"
	if captor.Drops {
		does = "drops all frames"
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeStateDiffers, "%s: a filter of another program on %s (%s) %s: %s",
		limit, link.Name, side, does, captor.Filter),
		"find it with 'tc filter show dev %s %s', and remove it with 'tc filter del'; 'podlace reload' leaves it", link.Name, side)
}

// checkEgress checks the redirect to the ifb device of an egress limit, and the token bucket of the ifb device. If the attachment has no
// record, checkEgress accepts the reference plugin's redirect, although this redirect does not match short frames. The command 'podlace
// reload' replaces such a redirect.
func checkEgress(host *kernel.Node, link kernel.Link, want state, ours bool) error {
	ifb, have, err := redirectedTo(host, link, want.IFB)
	if err != nil {
		return err
	}
	if lost := notRedirected(link, ifb, want.IFB, have); lost != "" && (ours || !ifb.Up || have != kernel.RedirectsLong) {
		err := plugin.Errorf(plugin.CodeStateDiffers, "egress: %s", lost)
		if ifb.Up && have == kernel.RedirectsLong {
			err = plugin.WithHint(err, "an earlier version made the redirect; podlace reload replaces it")
		}
		return err
	}
	captor, ok, err := host.Captor(link, kernel.Receiving)
	if err != nil {
		return err
	}
	if ok && (captor.Drops || captor.To != ifb.Index) {
		return captureError(link, kernel.Receiving, "egress", captor)
	}
	if err := checkBucket(host, ifb, *want.Egress, ours); err != nil {
		return err
	}
	return checkSending(host, ifb, "egress")
}

// redirectedTo returns the ifb device of an egress limit. The second result says which frames of the link are redirected to the ifb device.
func redirectedTo(host *kernel.Node, link kernel.Link, name string) (ifb kernel.Link, have kernel.Redirection, err error) {
	ifb, ok, err := device(host, name)
	if err == nil && ok {
		have, err = host.Redirected(link, ifb)
	}
	return ifb, have, err
}

// notRedirected returns the reason why some frames of the link bypass the ifb device of an egress limit. notRedirected returns "" if all
// frames are redirected.
func notRedirected(link, ifb kernel.Link, name string, have kernel.Redirection) string {
	switch {
	case !ifb.Up:
		return fmt.Sprintf("device %s is missing or down", name)
	case have == kernel.RedirectsNone:
		return fmt.Sprintf("the redirect from %s to %s is missing", link.Name, name)
	case have == kernel.RedirectsLong:
		return fmt.Sprintf("the redirect from %s to %s lets frames shorter than 18 bytes pass the limit", link.Name, name)
	}
	return ""
}

// checkBucket compares the token bucket of a link with the wanted bucket. If the attachment has no record, checkBucket compares only the
// rate, because the reference plugin uses another burst and another queue length.
func checkBucket(host *kernel.Node, link kernel.Link, want kernel.Bucket, ours bool) error {
	has, ok, err := host.Shaped(link)
	if err != nil {
		return err
	}
	if !ok {
		return plugin.Errorf(plugin.CodeStateDiffers, "%s", noBucket(link))
	}
	// The kernel stores rates in whole bytes per second, and bursts in ticks.
	same := has.Limit == want.Limit && nearBurst(has.Burst, want.Burst, want.Rate) && nearFair(has.Fair, want.Fair)
	if has.Rate/8 != want.Rate/8 || ours && !same {
		return plugin.Errorf(plugin.CodeStateDiffers, "the token bucket of %s is %s, want %s", link.Name, has, want)
	}
	return nil
}

func noBucket(link kernel.Link) string {
	return fmt.Sprintf("the token bucket of %s is missing", link.Name)
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
