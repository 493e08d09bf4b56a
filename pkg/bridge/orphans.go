// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
)

// orphan is the host side of a live attachment whose bridge was deleted, with the recorded state.
type orphan struct {
	link kernel.Link
	state
}

// findOrphans returns the host sides without a bridge that were ports of this one, according to the records of any network. It is called
// only if the bridge is missing, is down, or is not the recorded one. ADD sets a bridge up as its last step, so one that is down may come
// from a killed ADD that had not restored the orphans yet.
func (j *job) findOrphans() (orphans []orphan, err error) {
	pods, err := attachment.States[state](attachment.AllOf(j.r.Plugin))
	if err != nil {
		return nil, err
	}
	for _, pod := range finished(pods) {
		if pod.State.Bridge != j.cfg.Bridge {
			continue
		}
		link, ok, err := recordedPort(j.host, pod)
		if err != nil {
			return nil, err
		}
		if ok && link.Master == 0 {
			orphans = append(orphans, orphan{link, pod.State})
		}
	}
	return orphans, nil
}

// previousMAC returns the MAC of the deleted bridge, with which the pods' neighbour entries stay valid, or a random one without orphans.
func previousMAC(orphans []orphan) net.HardwareAddr {
	for _, o := range orphans {
		if mac, err := net.ParseMAC(o.BridgeMAC); err == nil && len(mac) == 6 && mac[0]&1 == 0 {
			return mac
		}
	}
	return randomMAC()
}

// restoreBridges creates the pods' missing bridges, restores the ports, sets up Podlace's bridges that are down, and attaches the gateways
// of VLANs. The next ADD restores what records do not tell: promiscuous mode and duplicate address detection.
func restoreBridges(host *kernel.Node, log *slog.Logger, pods []attachment.Of[state]) error {
	names := map[string]bool{}
	for _, pod := range pods {
		names[pod.State.Bridge] = true
	}
	var errs []error
	var down []kernel.Link
	for name := range names {
		link, ok, err := host.Link(name)
		if err == nil && !ok {
			log.Warn("the bridge of pods is missing and is created again", "bridge", name)
			link, err = createBridge(host, name)
		}
		if err == nil && link.Made() && !link.Up {
			down = append(down, link)
			err = host.Set(link.Lacks(hardenedSysctls(name, false)...)...)
		}
		errs = append(errs, err)
	}
	errs = append(errs, restorePorts(host, log, pods))
	for _, link := range down {
		log.Warn("the bridge of pods is down and is set up", "bridge", link.Name)
		errs = append(errs, host.SetUp(link))
	}
	for _, pod := range pods {
		name := pod.State.gatewayLink()
		if name == "" || names[name] {
			continue
		}
		names[name] = true
		link, ok, err := host.Link(pod.State.Bridge)
		if err == nil && ok {
			_, err = (&job{host: host}).ensureGatewayLink(link, name, pod.State.VLANs)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// createBridge creates a bridge for the recorded pods of all networks. Its MTU is that of its smallest port.
func createBridge(host *kernel.Node, name string) (link kernel.Link, err error) {
	pods, err := attachment.States[state](attachment.AllOf("bridge"))
	var on []orphan
	filtered, vlans := false, false
	for _, pod := range finished(pods) {
		if st := pod.State; st.Bridge == name {
			on = append(on, orphan{state: st})
			filtered = filtered || len(st.Gateways) > 0 && st.gatewayLink() == ""
			vlans = vlans || st.VLANs.used()
		}
	}
	if err == nil {
		err = host.AddBridge(name, previousMAC(on), 0, filtered, vlans)
	}
	if err != nil && !isExist(err) {
		return link, err
	}
	link, ok, err := host.Link(name)
	return link, errIfDeleted(name, ok, err)
}

// prepareNewBridge pins the MAC of a bridge that is new to the network and restores the orphans. A bridge is new, even if it is up, if its
// ifindex or MAC differs from that in the network's note file.
func (j *job) prepareNewBridge(bridge kernel.Link, orphans []orphan) error {
	note, identity := ipam.BridgeNote(bridge.Name), fmt.Sprint(bridge.Index, " ", bridge.MAC)
	last, noted := attachment.ReadNote(j.att.Network, note)
	if noted && last == identity {
		j.restoreOrphans(bridge, orphans)
		return nil
	}
	// An unpinned bridge takes the lowest MAC of its ports. When it changes, pods send to the previous one for some seconds, and another
	// program's bridge loses the MAC that its neighbours know. The reference plugin pins the MAC whenever it adds a gateway address.
	if !bridge.Made() {
		if err := j.host.SetMAC(bridge, bridge.MAC); err != nil {
			return err
		}
	}
	if noted && bridge.Up {
		var err error
		if orphans, err = j.findOrphans(); err != nil {
			return err
		}
	}
	j.restoreOrphans(bridge, orphans)
	return attachment.WriteNote(j.att.Network, note, identity)
}

// restoreOrphans attaches orphans to the bridge with settings and gateway addresses. It only logs errors, because ADD is for another pod.
func (j *job) restoreOrphans(bridge kernel.Link, orphans []orphan) {
	for _, o := range orphans {
		err := j.restoreOrphan(bridge, o)
		j.r.Log.Warn("attached a pod again after its bridge was deleted", "bridge", bridge.Name, "port", o.link.Name, "error", err)
	}
}

func (j *job) restoreOrphan(bridge kernel.Link, o orphan) error {
	errs := []error{restorePort(j.host, bridge, o.link, o.state)}
	gateway, err := j.ensureGatewayLink(bridge, cmp.Or(o.gatewayLink(), bridge.Name), o.VLANs)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	has, err := j.host.Addresses(gateway)
	errs = append(errs, err)
	for _, gw := range o.Gateways {
		if !slices.Contains(has, gw) {
			errs = append(errs, restoreGateway(j.host, gateway, gw, j.cfg.DAD))
		}
	}
	return errors.Join(errs...)
}
