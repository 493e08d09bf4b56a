// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// checkFilters returns an error if a tc filter on the host-side veth drops all frames of the pod. It ignores filters that redirect frames,
// which another program may need for a service. A link without classifiers, as of a pod without limits, costs one netlink request.
func (j *job) checkFilters(link kernel.Link) error {
	if has, err := j.host.HasClassifiers(link); err != nil || !has {
		return err
	}
	for _, side := range []kernel.Side{kernel.Receiving, kernel.Sending} {
		captor, ok, err := j.host.Captor(link, side)
		if err != nil {
			return err
		}
		if ok && captor.Drops {
			return plugin.WithHint(plugin.Differs("a filter of another program on %s (%s) drops all frames: %s", link.Name, side, captor.Filter),
				"find it with 'tc filter show dev %s %s', and remove it with 'tc filter del'", link.Name, side)
		}
	}
	return nil
}
