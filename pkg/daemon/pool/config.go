// SPDX-License-Identifier: Apache-2.0

// Package pool assigns the network devices of a machine to the resources in a configuration. Package pool also explains why each device is
// assigned to its resource. Package pool also chooses devices of a pool for a container. Package pool does no I/O. The same input always
// gives the same result.
//
// The configuration extends the config.json of the SR-IOV network device plugin. Parse returns an error with all malformed entries. A
// configured device that is missing on a node causes no error, because many nodes use the same configuration. The function Findings reports
// configured devices that are missing.
package pool

import (
	"cmp"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// Policy determines which devices of a pool the function Prefer chooses if several devices are free.
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

// API selects the Kubernetes API through which a resource is offered. Each VF belongs to only one resource. The two APIs (device plugin and
// DRA) can therefore never allocate the same VF.
type API string

// The values of api.
const (
	DevicePlugin API = "device-plugin"
	DRA          API = "dra" // ResourceSlices and ResourceClaims
)

// Taints contains the effects of the taints that faulty devices get in ResourceSlices: NoSchedule, NoExecute, None, or "off" for no taint.
type Taints struct{ LinkDown, Unhealthy, Gone string }

// NoTaint is the value of a field of Taints for which devices get no taint.
const NoTaint = "off"

// Config is a validated configuration.
type Config struct {
	Resources []Resource
	PFs       []pfEntry
	Taints    Taints    // for resources of the API DRA
	AnyDRA    bool      // a resource has the API DRA, on this host or on another host
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
	UnknownNUMA     unknownMode
	Policy          Policy
	Driver          string             // driver to bind devices to; "" keeps their driver
	VF              *vfconfig.Config   // configuration in the DeviceClass of the resource; nil for none
	ClaimMay        vfconfig.Allowance // for the API DRA: keys that claims may set for their VFs
	CDI             CDI
	Unserved        []Problem // why the resource is not offered; it still takes its devices from later resources
	otherType       bool      // the deviceType is not supported, so the resource matches no device
	hosts           []string
}

// FullName returns the name with which pods request the resource. This name consists of the resource prefix and the resource name.
func (r *Resource) FullName() string { return r.Prefix + "/" + r.Name }

// A selector matches a device if the device meets all conditions of the selector.
type selector struct {
	Place
	Conditions []condition
	RDMA       bool // containers get the RDMA device files
	VhostNet   bool // containers get /dev/vhost-net and /dev/net/tun
}

// A condition is one key of a selector. A device meets a condition if it has one of the values of the key.
type condition struct {
	Place
	Name string // the key, such as pfNames
	test test
}

// The Go interface "test" is implemented by each kind of condition.
type test interface {
	want() string
	found(subject) string
	met(subject) bool
	missing(*node) []string // wanted values that no device of the node can have, one sentence each
}

// pfEntry is an entry of the list pfs. Each pfEntry defines the number of VFs of one PF. A pfEntry identifies the PF by its interface
// (Name) or its PCI address (Address).
type pfEntry struct {
	Place
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
}

// Parse parses and validates a configuration. The error of Parse contains every Problem of the configuration. Each Problem is a text of one
// line.
func Parse(src Source, data []byte) (*Config, error) {
	r := &reader{file: src.File}
	if _, err := resourcePrefix(src.Prefix); err != nil {
		r.fail(Place{File: src.File, Line: 1}, "default resourcePrefix: %v", err)
	}
	root, ok := parseJSON(r, data)
	if !ok {
		return nil, r.joinProblems()
	}
	c := r.readConfig(root, src)
	if err := r.joinProblems(); err != nil {
		return nil, err
	}
	c.Notes = r.notes
	return c, nil
}

// readConfig reads the whole configuration. readConfig validates entries for other hosts too, but does not add them to the result.
func (r *reader) readConfig(root value, src Source) *Config {
	c := &Config{Taints: Taints{LinkDown: "NoSchedule", Unhealthy: "NoSchedule", Gone: "NoExecute"}}
	cdi := CDIAuto
	var resources value
	keys := r.readObject(root, []field{
		{"resourceList", func(v value) { resources = v }},
		{"pfs", r.listOf(func(v value) {
			if pf := r.readPF(v); onHost(pf.hosts, src.Host) {
				c.PFs = append(c.PFs, pf)
			}
		})},
		{"cdi", oneOf(r, &cdi, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"dra", func(v value) { r.readDRA(v, &c.Taints) }},
	})
	r.requireKey(root, keys, "resourceList")
	if resources.kind != "" { // after cdi, which may come later in the file
		r.listOf(func(v value) {
			resource := r.readResource(v, src.Prefix, cdi)
			c.AnyDRA = c.AnyDRA || resource.API == DRA
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

func (r *reader) readResource(v value, prefix string, cdi CDI) Resource {
	res := Resource{Place: v.Place, Prefix: prefix, API: DevicePlugin, UnknownNUMA: unknownOmit, Policy: NUMABestFit, CDI: cdi}
	r.unserved = nil
	keys := r.readObject(v, []field{
		{"resourceName", r.checkedString(&res.Name, resourceName)},
		{"resourcePrefix", r.checkedString(&res.Prefix, func(s string) (string, error) { return resourcePrefix(cmp.Or(s, prefix)) })},
		{"deviceType", func(v value) { r.readDeviceType(v, &res) }},
		{"excludeTopology", r.readBoolean(&res.ExcludeTopology)},
		{"additionalInfo", func(v value) { res.AdditionalInfo = r.readAdditionalInfo(v) }},
		{"selectors", func(v value) { res.Selectors = r.readSelectors(v) }},
		{"splitByNuma", r.readBoolean(&res.SplitByNUMA)},
		{"unknownNuma", oneOf(r, &res.UnknownNUMA, unknownOmit, unknownAll, unknownExclude)},
		{"policy", oneOf(r, &res.Policy, NUMABestFit, Pack, Balance, DistinctPF)},
		{"driver", r.checkedString(&res.Driver, driverName)},
		{"cdi", oneOf(r, &res.CDI, CDIAuto, CDIField, CDIAnnotation, CDIOff)},
		{"api", oneOf(r, &res.API, DevicePlugin, DRA)},
		{"vf", func(v value) { res.VF = r.readVF(v) }},
		{"claimMay", func(v value) { res.ClaimMay = r.readClaimMay(v) }},
		{"hosts", r.stringList(&res.hosts, hostPattern)},
	}, field{"SelectorObj", r.readNull}, field{"SelectorObjs", r.readNull})
	res.Unserved = r.unserved
	r.requireKey(v, keys, "resourceName")
	r.checkSplit(&res, keys)
	r.checkDriver(&res, keys)
	r.checkAPI(v, &res)
	return res
}

// readPF reads an entry of pfs.
func (r *reader) readPF(v value) pfEntry {
	pf := pfEntry{Place: v.Place}
	keys := r.readObject(v, []field{
		{"pfName", r.checkedString(&pf.Name, interfaceName)},
		{"pciAddress", r.readAddress(&pf.Address)},
		{"numVfs", func(v value) { pf.NumVFs, _ = r.readInteger(v, 0, maxVFs) }},
		{"offerPf", r.readBoolean(&pf.Offer)},
		{"offerWhole", r.readBoolean(&pf.Whole)},
		{"hosts", r.stringList(&pf.hosts, hostPattern)},
	})
	r.requireKey(v, keys, "numVfs")
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

// readAdditionalInfo reads the additional data for containers. Each key of the map that readAdditionalInfo returns is a PCI address, or "*"
// for all devices.
func (r *reader) readAdditionalInfo(v value) map[string]map[string]string {
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
