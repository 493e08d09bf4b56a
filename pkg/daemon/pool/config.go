// SPDX-License-Identifier: Apache-2.0

// Package pool assigns the network devices of a machine to the resources of a configuration, explains why, and chooses devices of a
// pool for a container. It does no I/O, and the same input always gives the same result.
//
// The configuration extends the config.json of the SR-IOV network device plugin. Parse returns an error with all malformed entries. A
// device that is missing on a node is none, because many nodes use the same configuration; Findings reports it.
package pool

import (
	"cmp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// Policy is which devices of a pool Prefer chooses if several are free.
type Policy string

// Values of Policy. For each policy, the comment of Prefer lists what the policy minimises.
const (
	NUMABestFit Policy = "numa-best-fit" // few NUMA nodes, first the one with the fewest free devices; there few PFs
	Pack        Policy = "pack"          // few PFs, so that whole PFs stay free
	Balance     Policy = "balance"       // the PFs with the most free devices
	DistinctPF  Policy = "distinct-pf"   // different PFs, if possible of different cards
)

// unknownMode determines how devices with an unknown NUMA node are offered on a machine with several NUMA nodes.
type unknownMode string

// Values of the key unknownNuma.
const (
	unknownOmit    unknownMode = "omit"    // offered without topology, in a separate resource if other devices have a node
	unknownAll     unknownMode = "all"     // offered as local to all nodes
	unknownExclude unknownMode = "exclude" // not offered
)

// CDI determines how a container gets the device files of its devices.
type CDI string

// The values of cdi.
const (
	CDIAuto       CDI = "auto"
	CDIField      CDI = "field"      // field cdi_devices of the device plugin API
	CDIAnnotation CDI = "annotation" // annotation cdi.k8s.io/*, for old kubelets
	CDIOff        CDI = "off"        // device specs instead of CDI
)

// API is the Kubernetes API through which a resource is offered. Each VF belongs to one resource, so the device plugin API and DRA can
// never allocate the same VF.
type API string

// The values of api.
const (
	DevicePlugin API = "device-plugin"
	DRA          API = "dra" // ResourceSlices and ResourceClaims
)

// Taints contains the effects of the taints that faulty devices get in ResourceSlices: NoSchedule, NoExecute, None, or "off" for no taint.
type Taints struct{ LinkDown, Unhealthy, Gone string }

// NoTaint is the value of a field of Taints, and of LinkDown, if the fault does not matter.
const NoTaint = "off"

// Config is a validated configuration.
type Config struct {
	Resources []Resource
	PFs       []pfEntry
	Taints    Taints           // for resources of the API DRA
	AnyDRA    bool             // a resource has the API DRA, on this host or on another host
	Notes     []strict.Problem // warnings that apply on every node
}

// Resource is an entry of resourceList.
type Resource struct {
	strict.Place
	Prefix, Name    string
	API             API
	ExcludeTopology bool
	AdditionalInfo  map[string]map[string]string // by PCI address, or "*" for all devices
	Selectors       []selector                   // a device belongs to the first selector that it meets; an empty list matches all devices
	SplitByNUMA     bool                         // one resource for each NUMA node: Name_numa0, Name_numa1
	UnknownNUMA     unknownMode
	LinkDown        string // NoTaint: devices whose PF has no carrier are healthy
	Policy          Policy
	Driver          string             // driver to bind devices to; "" keeps their driver
	VF              *vfconfig.Config   // configuration in the DeviceClass of the resource; nil for none
	ClaimMay        vfconfig.Allowance // for the API DRA: keys that claims may set for their VFs
	CDI             CDI
	Unserved        []strict.Problem // why the resource is not offered; it still takes its devices from later resources
	otherType       bool             // the deviceType is not supported, so the resource matches no device
	hosts           []string
}

// FullName returns the name with which pods request the resource. This name consists of the resource prefix and the resource name.
func (r *Resource) FullName() string { return strings.TrimPrefix(r.Prefix+"/"+r.Name, "/") }

// A selector matches a device if the device meets all conditions of the selector.
type selector struct {
	strict.Place
	Conditions []condition
	RDMA       bool // containers get the RDMA device files
	VhostNet   bool // containers get /dev/vhost-net and /dev/net/tun
}

// A condition is one key of a selector. A device meets a condition if it has one of the values of the key.
type condition struct {
	strict.Place
	Name string // the key, such as pfNames
	test test
}

// test is implemented by each kind of condition.
type test interface {
	want() string
	found(subject) string
	met(subject) bool
	missing(*node) []string // wanted values that no device of the node can have, one sentence each
}

// pfEntry is an entry of pfs: the number of VFs of the PF with this interface (Name) or PCI address (Address).
type pfEntry struct {
	strict.Place
	Name    string
	Address pci.Address
	NumVFs  int
	Offer   bool // offers the PF itself, which has no VFs
	Whole   bool // offers the PF itself by DRA; a pod gets it while no pod has one of its VFs
	hosts   []string
}

// Source describes where a configuration comes from, and contains default values for the configuration.
type Source struct {
	File   string // file name for messages
	Prefix string // default resourcePrefix
	Host   string // an entry with hosts applies only if a pattern matches this name
	Strict bool   // an unsupported entry is an error

	AllHosts bool // read the entries of all hosts, which may have several of one resource

	AnyPrefix bool // the default resourcePrefix is unknown, and full names lack it
}

// maxBytes is the maximum size of a configuration in bytes.
const maxBytes = 1 << 20

// Parse parses and validates a configuration. Its error is a value of strict.Problems.
func Parse(src Source, data []byte) (*Config, error) {
	r := &reader{Report: &strict.Report{File: src.File, Lenient: true}}
	start := strict.Place{File: src.File, Line: 1, Column: 1}
	if _, err := resourcePrefix(src.Prefix); err != nil && !src.AnyPrefix {
		r.Fail(start, "default resourcePrefix: %v", err)
	}
	if len(data) > maxBytes {
		r.Fail(start, "too large: want at most %d bytes", maxBytes)
		return nil, r.Err()
	}
	root, ok := r.ParseJSON(data)
	if !ok {
		return nil, r.Err()
	}
	c := r.readConfig(root, src)
	if err := r.Err(); err != nil {
		return nil, err
	}
	c.Notes = r.Notes
	return c, nil
}

// reader converts values into a configuration. Some files for the SR-IOV network device plugin rely on encoding/json, so null and the
// case of keys do not matter.
type reader struct {
	*strict.Report
	unserved strict.Report // notes about valid keys for which the current resource is not offered
}

// readConfig reads the whole configuration. It validates entries for other hosts too, but does not add them to the result.
func (r *reader) readConfig(root strict.Value, src Source) *Config {
	c := &Config{Taints: Taints{LinkDown: "NoSchedule", Unhealthy: "NoSchedule", Gone: "NoExecute"}}
	cdi := CDIAuto
	var resources strict.Value
	keys := r.Object(root, strict.Fields{
		"resourceList": func(v strict.Value) { resources = v },
		"pfs": r.Each(func(v strict.Value) {
			if pf := r.readPF(v); src.AllHosts || onHost(pf.hosts, src.Host) {
				c.PFs = append(c.PFs, pf)
			}
		}),
		"cdi": strict.To(r.Report, &cdi, strict.OneOf(CDIAuto, CDIField, CDIAnnotation, CDIOff)),
		"dra": func(v strict.Value) { r.readDRA(v, &c.Taints) },
	})
	r.Require(root, keys, "resourceList", "")
	if resources.Data != nil { // after cdi, which may come later in the file
		r.Each(func(v strict.Value) {
			resource := r.readResource(v, src.Prefix, cdi)
			c.AnyDRA = c.AnyDRA || resource.API == DRA
			if !src.AllHosts && !onHost(resource.hosts, src.Host) {
				r.Note(v.Place, "resource %s: only for hosts %s; this host is %s", resource.FullName(), strings.Join(resource.hosts, ", "),
					src.Host)
				return
			}
			for _, p := range resource.Unserved {
				if src.Strict {
					r.Fail(p.Place, "%s", p.Text)
				}
			}
			c.Resources = append(c.Resources, resource)
		})(resources)
		if list, _ := resources.Data.(strict.List); len(list) == 0 && len(c.PFs) == 0 {
			r.Note(resources.Place, "no resource is configured: no device is offered")
		}
	}
	r.checkNames(slices.DeleteFunc(slices.Clone(c.Resources), func(res Resource) bool { return !onHost(res.hosts, src.Host) }))
	r.checkPFs(slices.DeleteFunc(slices.Clone(c.PFs), func(pf pfEntry) bool { return !onHost(pf.hosts, src.Host) }))
	return c
}

func (r *reader) readResource(v strict.Value, prefix string, cdi CDI) Resource {
	res := Resource{Place: v.Place, Prefix: prefix, API: DevicePlugin, UnknownNUMA: unknownOmit, Policy: NUMABestFit, CDI: cdi}
	r.unserved = strict.Report{}
	keys := r.Object(v, strict.Fields{
		"resourceName": strict.To(r.Report, &res.Name, resourceName),
		"resourcePrefix": func(v strict.Value) {
			if v.Data != "" {
				strict.To(r.Report, &res.Prefix, resourcePrefix)(v)
			}
		},
		"deviceType":      func(v strict.Value) { r.readDeviceType(v, &res) },
		"excludeTopology": r.Bool(&res.ExcludeTopology),
		"additionalInfo":  func(v strict.Value) { res.AdditionalInfo = r.readAdditionalInfo(v) },
		"selectors":       func(v strict.Value) { res.Selectors = r.readSelectors(v) },
		"splitByNuma":     r.Bool(&res.SplitByNUMA),
		"unknownNuma":     strict.To(r.Report, &res.UnknownNUMA, strict.OneOf(unknownOmit, unknownAll, unknownExclude)),
		"linkDown":        strict.To(r.Report, &res.LinkDown, strict.OneOf("unhealthy", NoTaint)),
		"policy":          strict.To(r.Report, &res.Policy, strict.OneOf(NUMABestFit, Pack, Balance, DistinctPF)),
		"driver":          strict.To(r.Report, &res.Driver, driverName),
		"cdi":             strict.To(r.Report, &res.CDI, strict.OneOf(CDIAuto, CDIField, CDIAnnotation, CDIOff)),
		"api":             strict.To(r.Report, &res.API, strict.OneOf(DevicePlugin, DRA)),
		"vf":              func(v strict.Value) { res.VF = r.readVF(v) },
		"claimMay":        func(v strict.Value) { res.ClaimMay = r.readClaimMay(v) },
		"hosts":           strict.ListTo(r.Report, &res.hosts, hostPattern),
	}, r.foreignKeys())
	res.Unserved = r.unserved.Notes
	r.Require(v, keys, "resourceName", "")
	r.checkKeys(&res, keys)
	r.checkAPI(v, &res)
	return res
}

func (r *reader) readPF(v strict.Value) pfEntry {
	pf := pfEntry{Place: v.Place}
	keys := r.Object(v, strict.Fields{
		"pfName":     strict.To(r.Report, &pf.Name, interfaceName),
		"pciAddress": strict.To(r.Report, &pf.Address, pci.ParseAddress),
		"numVfs":     strict.To(r.Report, &pf.NumVFs, strict.Between(0, maxVFs)),
		"offerPf":    r.Bool(&pf.Offer),
		"offerWhole": r.Bool(&pf.Whole),
		"hosts":      strict.ListTo(r.Report, &pf.hosts, hostPattern),
	})
	r.Require(v, keys, "numVfs", "")
	if pf.Offer && pf.NumVFs > 0 {
		r.Fail(keys["offerPf"], "a PF with VFs cannot be offered itself: want \"numVfs\": 0")
	}
	if pf.Whole && pf.NumVFs == 0 && keys["numVfs"] != (strict.Place{}) {
		r.Fail(keys["offerWhole"], "the PF has no VFs: want numVfs above 0, or offerPf instead")
	}
	_, name := keys["pfName"]
	if _, address := keys["pciAddress"]; name == address && keys != nil {
		r.Fail(v.Place, "want either pfName or pciAddress")
	}
	return pf
}

// foreignKeys returns the keys of a resource that cause an error of their own.
func (r *reader) foreignKeys() strict.Fields {
	fields := r.selectorKeys(&selector{})
	for key := range fields {
		fields[key] = func(v strict.Value) { r.Fail(v.Place, "unknown key; it belongs in selectors") }
	}
	for _, key := range []string{"SelectorObj", "SelectorObjs"} {
		fields[key] = func(v strict.Value) { r.Fail(v.Place, "want null, as the SR-IOV network operator writes it") }
	}
	return fields
}

// readAdditionalInfo reads the additional data for containers, by PCI address or "*" for all devices.
func (r *reader) readAdditionalInfo(v strict.Value) map[string]map[string]string {
	out := map[string]map[string]string{}
	r.Members(func(device strict.Value) {
		address, err := pci.ParseAddress(device.Name)
		if err != nil && device.Name != "*" {
			r.Fail(device.Place, `want a PCI address, such as 0000:3b:10.2, or "*"`)
		}
		key := cmp.Or(address.String(), device.Name)
		if out[key] != nil {
			r.Fail(device.Place, "duplicate key")
		}
		info := map[string]string{}
		r.Members(func(v strict.Value) {
			var text string
			r.Text(&text)(v)
			info[v.Name] = text
		})(device)
		out[key] = info
	})(v)
	return out
}
