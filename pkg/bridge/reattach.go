// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strconv"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
)

// port is the host side of a live attachment whose bridge was deleted by somebody, with what its record says.
type port struct {
	link kernel.Link
	state
}

// lostPorts returns the host sides that the records of all networks name as ports of the bridge and that have no bridge now. It is
// called only when the bridge is missing or down, or another than the network had: it comes up as the last step, so that a bridge which is
// down may be one whose maker was killed before it had attached them.
func (j *job) lostPorts() ([]port, error) {
	records, err := attachment.All()
	if err != nil {
		return nil, err
	}
	var lost []port
	for _, rec := range records {
		p := port{}
		if rec.Plugin != j.r.Plugin || json.Unmarshal(rec.State, &p.state) != nil || p.Bridge != j.cfg.Bridge || p.Unfinished || p.Index == 0 {
			continue
		}
		var ok bool
		if p.link, ok, err = j.host.LinkByIndex(p.Index); err != nil {
			return nil, err
		}
		if ok && p.link.Name == rec.HostVeth() && p.link.Master == 0 {
			lost = append(lost, p)
		}
	}
	return lost, nil
}

// formerMAC returns the MAC that the bridge had, so that the pods' neighbour entries stay right; without lost ports a random one.
func formerMAC(lost []port) net.HardwareAddr {
	for _, p := range lost {
		if mac, err := net.ParseMAC(p.BridgeMAC); err == nil && len(mac) == 6 && mac[0]&1 == 0 {
			return mac
		}
	}
	return randomMAC()
}

// reattachMoved is reattach with what is known of the bridge: a note of the network has the index of the link, so that a bridge that somebody
// deleted and made anew is seen, up as it may be.
func (j *job) reattachMoved(bridge kernel.Link, lost []port) error {
	note, index := "bridge-"+bridge.Name, strconv.Itoa(bridge.Index)
	last, noted := j.att.Noted(note)
	if noted && last != index && bridge.Up {
		var err error
		if lost, err = j.lostPorts(); err != nil {
			return err
		}
	}
	j.reattach(bridge, lost)
	if noted && last == index {
		return nil
	}
	return j.att.Note(note, index)
}

// reattach makes lost ports ports of the bridge again, with their settings and their gateway addresses. What fails is logged only: this
// ADD is about another pod.
func (j *job) reattach(bridge kernel.Link, lost []port) {
	for _, p := range lost {
		err := j.reattachPort(bridge, p)
		j.r.Log.Warn("attached a pod again, whose bridge was deleted", "bridge", bridge.Name, "port", p.link.Name, "error", err)
	}
}

func (j *job) reattachPort(bridge kernel.Link, p port) error {
	errs := []error{j.host.SetMaster(p.link, bridge)}
	if p.VLANs.used() {
		errs = append(errs, j.setVLANs(bridge, p.link, p.VLANs))
	}
	if p.Hairpin {
		errs = append(errs, j.host.SetHairpin(p.link, true))
	}
	if p.Isolated {
		errs = append(errs, j.host.SetIsolated(p.link, true))
	}
	if !p.link.Up {
		errs = append(errs, j.host.SetUp(p.link))
	}
	as := *j
	as.cfg.VLANs, as.cfg.Gateway, as.cfg.IPAM = p.VLANs, len(p.Gateways) > 0, ipam.Type(p.IPAM)
	gateway, err := as.ensureGatewayLink(bridge)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	has, err := j.host.Addresses(gateway)
	errs = append(errs, err)
	for _, gw := range p.Gateways {
		if slices.Contains(has, gw) {
			continue
		}
		if gw.Addr().Is6() {
			errs = append(errs, j.host.Set(kernel.Sysctl{Path: "ipv6/conf/" + gateway.Name + "/disable_ipv6", Value: "0"}))
		}
		if err := j.host.AddAddress(gateway, gw, j.cfg.DAD); err != nil && !isExist(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
