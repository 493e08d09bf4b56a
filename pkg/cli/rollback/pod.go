// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/reference"
)

func (j *job) steps(key attachment.Key, siblings []attachment.Key, records map[string]attachment.Record,
	conf reconcile.Network) ([]attachment.Step, error) {
	if _, ok := records["sriov"]; ok {
		return nil, errors.New("it has VFs, which the reference does not bring back: have the runtime delete the pod")
	}
	if err := checkLegible(records); err != nil {
		return nil, err
	}
	alive, err := j.isAlive(key, records)
	if err != nil {
		return nil, err
	}
	if !alive {
		return []attachment.Step{j.removeResidue(key, records)}, nil
	}
	addresses, err := addressesOf(siblings)
	if err != nil {
		return nil, err
	}
	var steps []attachment.Step
	if rec, ok := records["bridge"]; ok {
		of, _ := bridge.FromRecord(rec) // checkLegible has parsed it, and the limits below
		j.indexes[[2]string{key.Network, of.DataDir}] = true
		if steps, err = bridge.ToReference(rec, addresses, conf.Plugin("bridge")); err != nil {
			return nil, j.explain(err, conf.Plugin("bridge"))
		}
	}
	if rec, ok := records["portmap"]; ok {
		more, err := portmap.ToReference(j.host, rec, addresses, conf.Plugin("portmap"))
		if err != nil {
			return nil, j.explain(err, conf.Plugin("portmap"))
		}
		steps = append(steps, more...)
	}
	if rec, ok := records["bandwidth"]; ok {
		if name, shared, _ := bandwidth.Device(rec); name != "" && !shared {
			steps = append(steps, attachment.Step{Text: "NOTE: the reference will not delete the device " + name + ": it has one per container"})
		}
	}
	return steps, nil
}

// checkLegible returns an error that names the record file if a plugin cannot parse its part.
func checkLegible(records map[string]attachment.Record) error {
	readers := map[string]func(attachment.Record) error{
		"bridge":    func(rec attachment.Record) error { _, err := bridge.FromRecord(rec); return err },
		"portmap":   func(rec attachment.Record) error { _, err := portmap.Targets(rec); return err },
		"bandwidth": func(rec attachment.Record) error { _, _, err := bandwidth.Device(rec); return err },
	}
	for name, reader := range readers {
		if rec, ok := records[name]; ok {
			if err := reader(rec); err != nil {
				return fmt.Errorf("record %s: %w: "+remedyHint, rec.Path(), err)
			}
		}
	}
	return nil
}

// explain adds the configurations' folder to the error if a configuration is missing.
func (j *job) explain(err error, conf json.RawMessage) error {
	if conf != nil {
		return err
	}
	return fmt.Errorf("%w: the configurations of %s were read, --conf-dir names another folder", err, j.ConfDir)
}

// isAlive reports whether an attachment's interface still exists, and not only because the kernel is slow to delete it after the end of the
// namespace. If another project's plugin made it, the pod's namespace must have an interface with one of the addresses to which ports are
// forwarded.
func (j *job) isAlive(key attachment.Key, records map[string]attachment.Record) (bool, error) {
	if rec, ok := records["bridge"]; ok {
		_, exists, err := j.host.Link(key.HostVeth())
		return exists && !plugin.NetnsEnded(rec.Netns), err
	}
	var targets []netip.Addr
	path := ""
	for _, rec := range records {
		path = rec.Netns
		if rec.Plugin != "portmap" {
			continue
		}
		var err error
		if targets, err = portmap.Targets(rec); err != nil {
			return false, err
		}
	}
	netns, err := plugin.OpenNetns(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer netns.Close()
	pod, err := kernel.Open(netns)
	if err != nil {
		return false, err
	}
	defer pod.Close()
	link, ok, err := pod.Link(key.IfName)
	if err != nil || !ok {
		return false, err
	}
	has, err := pod.Addresses(link)
	return len(targets) == 0 || slices.ContainsFunc(has, func(p netip.Prefix) bool { return slices.Contains(targets, p.Addr()) }), err
}

func addressesOf(siblings []attachment.Key) (addresses []netip.Prefix, err error) {
	for _, key := range siblings {
		records, err := attachment.RecordsOf(key, "bridge")
		if err != nil {
			return nil, fmt.Errorf("%w: "+remedyHint, err)
		}
		rec, ok := records["bridge"]
		if !ok {
			continue
		}
		of, err := bridge.FromRecord(rec)
		if err != nil {
			return nil, fmt.Errorf("record %s: %w: "+remedyHint, rec.Path(), err)
		}
		addresses = append(addresses, of.Addresses...)
	}
	return addresses, nil
}

// removeResidue returns a step that removes the rules and devices of a pod that has ended. The next DEL, of Podlace or the reference
// plugin, releases the addresses.
func (j *job) removeResidue(key attachment.Key, records map[string]attachment.Record) attachment.Step {
	return attachment.Step{Text: "its pod has ended: remove its rules and devices", Do: func() error {
		errs := []error{reference.Bridge(reference.Of(key)).Remove(), reference.Portmap(reference.Of(key)).Remove()}
		if rec, ok := records["portmap"]; ok {
			errs = append(errs, portmap.EndPorts(j.host, rec))
		}
		if rec, ok := records["bandwidth"]; ok {
			name, _, err := bandwidth.Device(rec)
			if err == nil && name != "" {
				err = j.host.DelLink(name)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}}
}
