// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// Names of the sources of metrics.
const (
	fromRecords   = "records"
	fromAddresses = "addresses"
	fromBandwidth = "bandwidth"
)

func sources() []string { return []string{fromRecords, fromAddresses, fromBandwidth} }

// Values of the label "direction", as the pod sees the traffic.
const (
	ingress = "ingress"
	egress  = "egress"
)

// readAll reads all sources of metrics, and leaves out those with an error.
func (c *Collector) readAll() metricValues {
	v := metricValues{}
	networks, confErr := c.configuredNetworks()
	for _, n := range networks {
		v.addNetwork(n)
	}
	records, damaged, recordsErr := attachment.Scan()
	c.addSource(v, fromRecords, func(v metricValues) error {
		list, err := reconcile.ListOf(records, networks)
		if err = errors.Join(recordsErr, err); err == nil {
			v.addRecords(list, damaged)
		}
		return err
	})
	c.addSource(v, fromAddresses, func(v metricValues) error { return errors.Join(confErr, v.addAddresses(networks)) })
	c.addSource(v, fromBandwidth, func(v metricValues) error {
		if recordsErr != nil {
			return recordsErr
		}
		return c.addBandwidth(v, records)
	})
	return v
}

// addSource adds the metrics of one source. It logs an error once, and again only when it changes.
func (c *Collector) addSource(v metricValues, source string, add func(metricValues) error) {
	began := time.Now()
	err := add(v)
	v.add(duration, time.Since(began).Seconds(), source)
	text := ""
	if err != nil {
		text = err.Error()
	} else {
		v.add(success, 1, source)
	}
	v.add(success, 0, source)
	if text != c.failed[source] && text != "" {
		c.log.Warn("metrics are incomplete", "collector", source, "error", err)
	}
	c.failed[source] = text
}

// configuredNetworks returns the networks that have a configuration on this node; none if the folder is missing.
func (c *Collector) configuredNetworks() ([]reconcile.Network, error) {
	if c.confDir == "" {
		return nil, nil
	}
	networks, _, err := reconcile.Networks(c.confDir)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return networks, err
}

// addNetwork adds a network's series with the value 0, so that they exist before the first pod.
func (v metricValues) addNetwork(n reconcile.Network) {
	if !slices.ContainsFunc(attachment.Plugins(), func(kind string) bool { return n.Plugin(kind) != nil }) {
		return
	}
	for _, m := range []metricName{attachments, orphaned, unreadable} {
		v.add(m, 0, n.Name)
	}
	if n.Plugin("bandwidth") == nil {
		return
	}
	for _, direction := range []string{ingress, egress} {
		for _, m := range []metricName{limits, limitRate, missing, backlog, sent, dropped} {
			v.add(m, 0, n.Name, direction)
		}
	}
}

// addRecords adds the metrics about attachments from the plugins' records.
func (v metricValues) addRecords(list []*reconcile.Attachment, damaged []attachment.Damaged) {
	used := usedPorts{}
	for _, a := range list {
		v.add(attachments, 1, a.Network)
		v.add(unreadable, 0, a.Network)
		used.add(a.HostPorts) // they lead to an orphaned attachment too
		if isOrphaned(a) {
			v.add(orphaned, 1, a.Network)
			continue
		}
		v.add(orphaned, 0, a.Network)
		for direction, rate := range map[string]uint64{ingress: a.IngressRate, egress: a.EgressRate} {
			if rate > 0 {
				v.add(limits, 1, a.Network, direction)
				v.add(limitRate, float64(rate)/8, a.Network, direction)
			}
		}
	}
	for _, d := range damaged {
		v.add(unreadable, 1, d.Network)
	}
	for _, protocol := range []string{"tcp", "udp", "sctp"} {
		v.add(hostPorts, float64(len(used[protocol])), protocol)
	}
}

// isOrphaned reports whether an attachment's network namespace is gone. It is false if this container does not see the namespace's folder.
func isOrphaned(a *reconcile.Attachment) bool {
	return a.State == reconcile.Gone && plugin.NetnsVisible(a.Netns)
}

// usedPorts contains the port numbers in use for each protocol.
type usedPorts map[string]map[uint16]bool

func (u usedPorts) add(list []ports.Port) {
	for _, p := range list {
		if u[p.Protocol] == nil {
			u[p.Protocol] = map[uint16]bool{}
		}
		for port := int(p.Port); port <= int(p.End()); port++ {
			u[p.Protocol][uint16(port)] = true
		}
	}
}

// addAddresses adds the leased and free addresses of each range set of each network. For invalid ranges, only the metrics of that network
// are missing.
func (v metricValues) addAddresses(networks []reconcile.Network) (err error) {
	for _, n := range networks {
		for _, p := range n.Plugins {
			if plugin.Kind(p.IPAM) != "host-local" {
				continue
			}
			usage, e := hostlocal.ReadUsage(&plugin.Request{Plugin: "host-local", Network: n.Name, CNIVersion: n.CNIVersion, Config: p.Config(),
				Log: slog.New(slog.DiscardHandler)})
			if e != nil {
				err = errors.Join(err, fmt.Errorf("network %s: %w", n.Name, e))
			}
			for set, u := range usage {
				family := map[bool]string{true: "ipv4", false: "ipv6"}[u.IPv4]
				v.add(addresses, float64(u.Leased), n.Name, family, strconv.Itoa(set), "leased")
				v.add(addresses, max(0, u.Size-float64(u.Leased)), n.Name, family, strconv.Itoa(set), "free")
			}
		}
	}
	return err
}

// addBandwidth adds metrics about bandwidth limits from the kernel: the qdiscs of all links in one request, and a few more requests for
// each pod with limits.
func (c *Collector) addBandwidth(v metricValues, records []attachment.Record) error {
	records = bandwidth.Records(records)
	for i := range records {
		if !plugin.NetnsVisible(records[i].Netns) {
			records[i].Netns = "" // otherwise the namespace would count as gone
		}
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	list, err := bandwidth.Read(host, records)
	if err != nil {
		return err
	}
	c.traffic.update(list)
	c.traffic.addTo(v)
	for _, l := range list {
		for direction, d := range limitedDirections(l) {
			v.add(missing, map[bool]float64{true: 1}[d.Missing != "" && !l.Gone], l.Network, direction)
			if d.Applied != nil {
				v.add(backlog, float64(d.Applied.Waiting), l.Network, direction)
			}
		}
	}
	return nil
}
