// SPDX-License-Identifier: Apache-2.0

// Package pool assigns the network devices of a machine to named pools, as the configuration says. It explains the assignment of each
// device, and chooses devices of a pool for a container. The package does no I/O: the same input always gives the same answer.
//
// The configuration extends the config.json of the SR-IOV network device plugin. Parse returns all malformed entries as errors. A device
// that a node lacks is not an error, because one configuration serves many nodes; Findings reports it.
package pool

import (
	"cmp"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// Policy selects which devices of a pool are preferred if several are free.
type Policy string

// The policies. Prefer documents what each of them minimises.
const (
	NUMABestFit Policy = "numa-best-fit" // few NUMA nodes, first the one with the fewest free devices; there few PFs
	Pack        Policy = "pack"          // few PFs, so that whole PFs stay free
	Balance     Policy = "balance"       // the PFs with the most free devices
	DistinctPF  Policy = "distinct-pf"   // different PFs, if possible of different cards
)

// unlocated is the treatment of devices of unknown NUMA node on a machine with several nodes.
type unlocated string

// The values of unknownNuma.
const (
	unlocatedOmit    unlocated = "omit"    // offered without topology, in a separate resource if other devices have a node
	unlocatedAll     unlocated = "all"     // offered as local to all nodes
	unlocatedExclude unlocated = "exclude" // not offered
)

// CDI selects how a container gets the device files of its devices.
type CDI string

// The values of cdi.
const (
	CDIAuto       CDI = "auto"
	CDIField      CDI = "field"      // field cdi_devices of the device plugin API
	CDIAnnotation CDI = "annotation" // annotation cdi.k8s.io/*, for old kubelets
	CDIOff        CDI = "off"        // device specs instead of CDI
)

// API is the Kubernetes API that offers a resource. Each VF belongs to one resource, so only one API assigns it.
type API string

// The values of api.
const (
	DevicePlugin API = "device-plugin"
	DRA          API = "dra" // ResourceSlices and ResourceClaims
)

// Taints are the effects of taints on faulty devices in ResourceSlices: NoSchedule, NoExecute, None, or "off" for no taint.
type Taints struct{ LinkDown, Unhealthy, Gone string }

// NoTaint is the effect of a fault without a taint.
const NoTaint = "off"

// Config is a validated configuration.
type Config struct {
	Resources []Resource
	PFs       []pfEntry
	Taints    Taints    // for resources of the API DRA
	Notes     []Problem // warnings that apply on every node
}

// Resource is an entry of resourceList.
type Resource struct {
	Place
	Prefix, Name    string
	API             API
	ExcludeTopology bool
	AdditionalInfo  map[string]map[string]string // by PCI address, or "*" for all devices
	Selectors       []selector                   // a device belongs to the first selector that it meets; an empty list matches all devices
	SplitByNUMA     bool                         // one resource for each NUMA node: Name_numa0, Name_numa1
	UnknownNUMA     unlocated
	Policy          Policy
	Driver          string             // driver to bind devices to; "" keeps their driver
	VF              *vfconfig.Config   // configuration in the DeviceClass of the resource; nil for none
	ClaimMay        vfconfig.Allowance // for the API DRA: keys that claims may set for their VFs
	CDI             CDI
	Unserved        []Problem // why the resource is not offered; it still takes its devices from later resources
	otherType       bool      // the deviceType is not supported, so the resource matches no device
	hosts           []string
}

// FullName returns prefix and name, as pods request the resource.
func (r *Resource) FullName() string { return r.Prefix + "/" + r.Name }

// selector matches a device that meets all its conditions.
type selector struct {
	Place
	Conditions []condition
	RDMA       bool // containers get the RDMA device files
	VhostNet   bool // containers get /dev/vhost-net and /dev/net/tun
}

// condition is one key of a selector. A device meets it by having one of the key's values.
type condition struct {
	Place
	Name string // the key, such as pfNames
	test test
}

// test is the check of a condition.
type test interface {
	want() string
	found(subject) string
	met(subject) bool
	missing(*node) []string // wanted values that no device of the node can have, one sentence each
}

// pfEntry is an entry of pfs: the number of VFs of a PF. Either Name, of the interface, or Address is set.
type pfEntry struct {
	Place
	Name    string
	Address pci.Address
	NumVFs  int
	Offer   bool // offers the PF itself, which has no VFs
	Whole   bool // offers the PF itself by DRA; a pod gets it while no pod has one of its VFs
	hosts   []string
}

// Source describes a configuration file and its defaults.
type Source struct {
	File   string // file name for messages
	Prefix string // default resourcePrefix
	Host   string // an entry with hosts applies only if a pattern matches this name
	Strict bool   // an unsupported entry is an error
}

// Parse reads a configuration. The error joins all Problems, one line each.
func Parse(src Source, data []byte) (*Config, error) {
	r := &reader{file: src.File}
	if _, err := resourcePrefix(src.Prefix); err != nil {
		r.fail(Place{File: src.File, Line: 1}, "default resourcePrefix: %v", err)
	}
	root, ok := parseJSON(r, data)
	if !ok {
		return nil, r.err()
	}
	c := r.config(root, src)
	if err := r.err(); err != nil {
		return nil, err
	}
	c.Notes = r.notes
	return c, nil
}

// config reads the whole file. It checks entries for other hosts, and then ignores them.
func (r *reader) config(root value, src Source) *Config {
	c := &Config{Taints: Taints{LinkDown: "NoSchedule", Unhealthy: "NoSchedule", Gone: "NoExecute"}}
	cdi := CDIAuto
	var resources value
	keys := r.object(root, []field{
		{"resourceList", func(v value) { resources = v }},
		{"pfs", r.listOf(func(v value) {
			if pf := r.pf(v); onHost(pf.hosts, src.Host) {
				c.PFs = append(c.PFs, pf)
			}
		})},
		{"cdi", oneOf(r, &cdi, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"dra", func(v value) { r.dra(v, &c.Taints) }},
	})
	r.require(root, keys, "resourceList")
	if resources.kind != "" { // after cdi, which may come later in the file
		r.listOf(func(v value) {
			resource := r.resource(v, src.Prefix, cdi)
			if !onHost(resource.hosts, src.Host) {
				r.note(v.Place, "resource %s: only for hosts %s; this host is %s", resource.FullName(), strings.Join(resource.hosts, ", "),
					src.Host)
				return
			}
			for _, p := range resource.Unserved {
				if src.Strict {
					r.fail(p.Place, "%s", p.Text)
				}
			}
			c.Resources = append(c.Resources, resource)
		})(resources)
		if len(resources.items) == 0 && len(c.PFs) == 0 {
			r.note(resources.Place, "no resource is configured: no device is offered")
		}
	}
	r.checkNames(c.Resources)
	r.checkPFs(c.PFs)
	return c
}

func (r *reader) resource(v value, prefix string, cdi CDI) Resource {
	res := Resource{Place: v.Place, Prefix: prefix, API: DevicePlugin, UnknownNUMA: unlocatedOmit, Policy: NUMABestFit, CDI: cdi}
	r.unserved = nil
	keys := r.object(v, []field{
		{"resourceName", r.checked(&res.Name, resourceName)},
		{"resourcePrefix", r.checked(&res.Prefix, func(s string) (string, error) { return resourcePrefix(cmp.Or(s, prefix)) })},
		{"deviceType", func(v value) { r.deviceType(v, &res) }},
		{"excludeTopology", r.boolean(&res.ExcludeTopology)},
		{"additionalInfo", func(v value) { res.AdditionalInfo = r.additionalInfo(v) }},
		{"selectors", func(v value) { res.Selectors = r.selectors(v) }},
		{"splitByNuma", r.boolean(&res.SplitByNUMA)},
		{"unknownNuma", oneOf(r, &res.UnknownNUMA, unlocatedOmit, unlocatedAll, unlocatedExclude)},
		{"policy", oneOf(r, &res.Policy, NUMABestFit, Pack, Balance, DistinctPF)},
		{"driver", r.checked(&res.Driver, driverName)},
		{"cdi", oneOf(r, &res.CDI, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"api", oneOf(r, &res.API, DevicePlugin, DRA)},
		{"vf", func(v value) { res.VF = r.vf(v) }},
		{"claimMay", func(v value) { res.ClaimMay = r.claimMay(v) }},
		{"hosts", r.stringList(&res.hosts, hostPattern)},
	}, field{"SelectorObj", r.nullOnly}, field{"SelectorObjs", r.nullOnly})
	res.Unserved = r.unserved
	r.require(v, keys, "resourceName")
	r.checkSplit(&res, keys)
	r.checkDriver(&res, keys)
	r.checkAPI(v, &res)
	return res
}

// pf reads an entry of pfs.
func (r *reader) pf(v value) pfEntry {
	pf := pfEntry{Place: v.Place}
	keys := r.object(v, []field{
		{"pfName", r.checked(&pf.Name, interfaceName)},
		{"pciAddress", r.address(&pf.Address)},
		{"numVfs", func(v value) { pf.NumVFs, _ = r.integer(v, 0, maxVFs) }},
		{"offerPf", r.boolean(&pf.Offer)},
		{"offerWhole", r.boolean(&pf.Whole)},
		{"hosts", r.stringList(&pf.hosts, hostPattern)},
	})
	r.require(v, keys, "numVfs")
	if pf.Offer && pf.NumVFs > 0 {
		r.fail(keys["offerPf"], "a PF with VFs cannot be offered itself: want \"numVfs\": 0")
	}
	if pf.Whole && pf.NumVFs == 0 && keys["numVfs"] != (Place{}) {
		r.fail(keys["offerWhole"], "the PF has no VFs: want numVfs above 0, or offerPf instead")
	}
	_, name := keys["pfName"]
	if _, address := keys["pciAddress"]; name == address && v.kind == object {
		r.fail(v.Place, "want either pfName or pciAddress")
	}
	return pf
}

// additionalInfo reads the data that containers get, by PCI address or "*".
func (r *reader) additionalInfo(v value) map[string]map[string]string {
	if !r.hasKind(v, object) {
		return nil
	}
	out := map[string]map[string]string{}
	for _, device := range v.members {
		address, err := pci.ParseAddress(device.key)
		if err != nil && device.key != "*" {
			r.fail(device.value.Place, `want a PCI address, such as 0000:3b:10.2, or "*"`)
		}
		key := cmp.Or(address.String(), device.key)
		if out[key] != nil {
			r.fail(device.value.Place, "duplicate key")
		}
		out[key] = r.info(device.value)
	}
	return out
}

func (r *reader) info(v value) map[string]string {
	info := map[string]string{}
	if !r.hasKind(v, object) {
		return info
	}
	for _, m := range v.members {
		if _, again := info[m.key]; again {
			r.fail(m.value.Place, "duplicate key")
		}
		if r.hasKind(m.value, text) {
			info[m.key] = m.value.text
		}
	}
	return info
}
