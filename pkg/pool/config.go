// SPDX-License-Identifier: Apache-2.0

// Package pool makes named pools of network devices out of a configuration and what a scan of the machine found, says of every device why
// it is where it is, and chooses devices out of a pool. All of it is arithmetic: the same input gives the same answer, and nothing is read
// or written.
//
// The configuration is that of the SR-IOV network device plugin (config.json), with more keys. What is malformed is an error, and Parse
// returns all of them. What a node lacks is none, because one configuration serves many nodes: Findings tells it.
package pool

import (
	"cmp"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// Policy says which devices of a pool are preferred when several are free.
type Policy string

// The policies. Prefer tells what each of them minimises.
const (
	NUMABestFit Policy = "numa-best-fit" // few NUMA nodes, the one with the fewest to spare; there few PFs
	Pack        Policy = "pack"          // few PFs, to leave whole PFs free
	Balance     Policy = "balance"       // the PFs with the most free devices
	DistinctPF  Policy = "distinct-pf"   // different PFs, then different cards
)

// unlocated says what becomes of devices whose NUMA node is unknown, on a machine with several.
type unlocated string

// What unknownNuma can be.
const (
	unlocatedOmit    unlocated = "omit"    // offered without a topology, in a resource of their own if the others are located
	unlocatedAll     unlocated = "all"     // offered as equally near to all nodes
	unlocatedExclude unlocated = "exclude" // not offered
)

// CDI says how a container gets the device files of its devices.
type CDI string

// What cdi can be.
const (
	CDIAuto       CDI = "auto"
	CDIField      CDI = "field"      // cdi_devices of the device plugin interface
	CDIAnnotation CDI = "annotation" // cdi.k8s.io/*, for old kubelets
	CDIOff        CDI = "off"        // device specs, without CDI
)

// API says by which API of Kubernetes a resource is given out. A VF is in one resource, so it has one owner.
type API string

// What api can be.
const (
	DevicePlugin API = "device-plugin"
	DRA          API = "dra" // ResourceSlices and ResourceClaims
)

// Taints are the effects of the taints that devices with faults get in ResourceSlices: NoSchedule, NoExecute, None, or "off" for no taint.
type Taints struct{ LinkDown, Unhealthy, Gone string }

// NoTaint is the effect of a fault that gives no taint.
const NoTaint = "off"

// Config is a validated configuration.
type Config struct {
	Resources []Resource
	PFs       []pfEntry
	Taints    Taints    // of resources with the API DRA
	Notes     []Problem // what is odd whatever the node
}

// Resource is an entry of resourceList.
type Resource struct {
	Place
	Prefix, Name    string
	API             API
	ExcludeTopology bool
	AdditionalInfo  map[string]map[string]string // by PCI address, or "*" for all
	Selectors       []selector                   // a device is taken by the first that it meets; none takes all
	SplitByNUMA     bool                         // one resource per NUMA node: Name_numa0, Name_numa1
	UnknownNUMA     unlocated
	Policy          Policy
	Driver          string             // to bind devices to, "" to leave them as they are
	VF              *vfconfig.Config   // for the DeviceClass of the resource; nil for none
	ClaimMay        vfconfig.Allowance // with the API DRA: what claims may set of their VFs
	CDI             CDI
	Unserved        []Problem // why nothing of it is offered; all the same, no later resource gets what it takes
	otherType       bool      // its devices are no network functions, so that it takes none
	hosts           []string
}

// FullName returns prefix and name, as a pod asks for the resource.
func (r *Resource) FullName() string { return r.Prefix + "/" + r.Name }

// selector is met by a device that meets all its conditions.
type selector struct {
	Place
	Conditions []condition
	RDMA       bool // devices come with their RDMA files
	VhostNet   bool // devices come with /dev/vhost-net and /dev/net/tun
}

// condition is one key of a selector. A device meets it by having one of the values.
type condition struct {
	Place
	Name string // of the key: pfNames
	test test
}

// test is what a condition asks.
type test interface {
	want() string
	found(subject) string
	met(subject) bool
	missing(*node) []string // what no device of the node can have, one sentence each
}

// pfEntry is an entry of pfs: how many VFs a PF shall have. Either Name, of its interface, or Address is set.
type pfEntry struct {
	Place
	Name    string
	Address pci.Address
	NumVFs  int
	Offer   bool // the PF itself is a device, without VFs
	Whole   bool // the PF itself is a device by DRA, which a pod gets while no pod has one of its VFs
	hosts   []string
}

// Source is what a configuration does not say itself.
type Source struct {
	File   string // its name, for messages
	Prefix string // of resources without resourcePrefix
	Host   string // entries with hosts count only where one of the patterns matches this name
	Strict bool   // an entry that is not supported is an error
}

// Parse reads a configuration. The error has all that is wrong, one line each, as Problems joined.
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

// config reads the whole file. Entries for other hosts are checked and left out.
func (r *reader) config(root value, src Source) *Config {
	c := &Config{Taints: Taints{LinkDown: "NoSchedule", Unhealthy: "NoSchedule", Gone: "NoExecute"}}
	cdi := CDIAuto
	var resources value
	keys := r.object(root, []field{
		{"resourceList", func(v value) { resources = v }},
		{"pfs", r.each(func(v value) {
			if pf := r.pf(v); onHost(pf.hosts, src.Host) {
				c.PFs = append(c.PFs, pf)
			}
		})},
		{"cdi", oneOf(r, &cdi, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"dra", func(v value) { r.dra(v, &c.Taints) }},
	})
	r.require(root, keys, "resourceList")
	if resources.kind != "" { // after cdi, wherever that stands
		r.each(func(v value) {
			resource := r.resource(v, src.Prefix, cdi)
			if !onHost(resource.hosts, src.Host) {
				r.note(v.Place, "resource %s: only for hosts %s, not for this one, %s", resource.FullName(), strings.Join(resource.hosts, ", "),
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
			r.note(resources.Place, "there is no resource: nothing is offered")
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
		{"excludeTopology", r.flag(&res.ExcludeTopology)},
		{"additionalInfo", func(v value) { res.AdditionalInfo = r.additionalInfo(v) }},
		{"selectors", func(v value) { res.Selectors = r.selectors(v) }},
		{"splitByNuma", r.flag(&res.SplitByNUMA)},
		{"unknownNuma", oneOf(r, &res.UnknownNUMA, unlocatedOmit, unlocatedAll, unlocatedExclude)},
		{"policy", oneOf(r, &res.Policy, NUMABestFit, Pack, Balance, DistinctPF)},
		{"driver", r.checked(&res.Driver, driverName)},
		{"cdi", oneOf(r, &res.CDI, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"api", oneOf(r, &res.API, DevicePlugin, DRA)},
		{"vf", func(v value) { res.VF = r.vf(v) }},
		{"claimMay", func(v value) { res.ClaimMay = r.claimMay(v) }},
		{"hosts", r.texts(&res.hosts, hostPattern)},
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
		{"offerPf", r.flag(&pf.Offer)},
		{"offerWhole", r.flag(&pf.Whole)},
		{"hosts", r.texts(&pf.hosts, hostPattern)},
	})
	r.require(v, keys, "numVfs")
	if pf.Offer && pf.NumVFs > 0 {
		r.fail(keys["offerPf"], "a PF with VFs is no device: want \"numVfs\": 0")
	}
	if pf.Whole && pf.NumVFs == 0 && keys["numVfs"] != (Place{}) {
		r.fail(keys["offerWhole"], "a PF without VFs excludes none: want numVfs above 0, or offerPf")
	}
	_, name := keys["pfName"]
	if _, address := keys["pciAddress"]; name == address && v.kind == object {
		r.fail(v.Place, "want either pfName or pciAddress")
	}
	return pf
}

// additionalInfo reads what is handed on to containers, by PCI address or "*".
func (r *reader) additionalInfo(v value) map[string]map[string]string {
	if !r.is(v, object) {
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
			r.fail(device.value.Place, "the key stands twice")
		}
		out[key] = r.info(device.value)
	}
	return out
}

func (r *reader) info(v value) map[string]string {
	info := map[string]string{}
	if !r.is(v, object) {
		return info
	}
	for _, m := range v.members {
		if _, again := info[m.key]; again {
			r.fail(m.value.Place, "the key stands twice")
		}
		if r.is(m.value, text) {
			info[m.key] = m.value.text
		}
	}
	return info
}
