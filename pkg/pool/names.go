// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

var (
	nameForm   = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
	edgeForm   = regexp.MustCompile(`^[a-zA-Z0-9](.*[a-zA-Z0-9])?$`)
	domainForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	driverForm = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	splitForm  = regexp.MustCompile(`^(.+)(_numa[0-9]+|_nonuma)$`)
)

// What Kubernetes leaves of an extended resource: it puts "requests." before the name to account for it.
const (
	maxName   = 63
	maxPrefix = 253 - len("requests.")
	maxNode   = 1023 // of the kernel
)

// noNUMA is the ending of a resource of devices whose NUMA node is unknown, where their siblings with a node have a resource of their own.
const noNUMA = "_nonuma"

// ofNUMA is the ending of the resource of a NUMA node. An underscore and letters make a valid name of any valid name: an extended resource
// may have letters, digits, "-", "_" and "." and ends in a letter or digit.
func ofNUMA(node int) string { return fmt.Sprintf("_numa%d", node) }

func resourceName(s string) (string, error) {
	switch {
	case !nameForm.MatchString(s):
		return "", fmt.Errorf("%+.80q: want letters, digits, - and _", s)
	case !edgeForm.MatchString(s):
		return "", fmt.Errorf("%+.80q: Kubernetes wants a letter or digit as first and last", s)
	case len(s) > maxName:
		return "", fmt.Errorf("%+.80q: want at most %d characters", s, maxName)
	}
	return s, nil
}

func resourcePrefix(s string) (string, error) {
	switch {
	case !domainForm.MatchString(s) || len(s) > maxPrefix ||
		slices.ContainsFunc(strings.Split(s, "."), func(l string) bool { return len(l) > 63 }):
		return "", fmt.Errorf("%+.80q: want a DNS subdomain, such as intel.com", s)
	case strings.HasSuffix(s, "kubernetes.io") || strings.HasPrefix(s, "requests."):
		return "", fmt.Errorf("%+.80q: Kubernetes keeps it for itself", s)
	}
	return s, nil
}

func driverName(s string) (string, error) {
	if !driverForm.MatchString(s) {
		return "", fmt.Errorf("%+.80q: want the name of a driver, such as vfio-pci", s)
	}
	return s, nil
}

// interfaceName accepts alternative names too, which are longer than 15 bytes.
func interfaceName(s string) (string, error) {
	if s == "" || s == "." || s == ".." || len(s) > 127 ||
		strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune("/#:", c) }) {
		return "", fmt.Errorf("%+.80q: want the name of an interface, such as ens1f0", s)
	}
	return s, nil
}

func hostPattern(s string) (string, error) {
	if _, err := path.Match(s, ""); err != nil || s == "" {
		return "", fmt.Errorf("%+.80q: want a pattern for host names, such as worker-*", s)
	}
	return s, nil
}

// onHost reports whether an entry counts on a host: without patterns it does on all.
func onHost(patterns []string, host string) bool {
	return len(patterns) == 0 || slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, host)
		return ok
	})
}

// variable returns what follows PCIDEVICE_ in the environment of a container.
func (r *Resource) variable() string {
	return strings.ToUpper(strings.ReplaceAll(r.Prefix+"_"+r.Name, ".", "_"))
}

// splits reports whether devices of the resource may be offered under its name with an ending.
func (r *Resource) splits(ending string) bool {
	if r.API == DRA {
		return false
	}
	if ending == noNUMA {
		return r.UnknownNUMA == unlocatedOmit && !r.ExcludeTopology || r.SplitByNUMA && r.UnknownNUMA != unlocatedExclude
	}
	return r.SplitByNUMA
}

// checkNames refuses resources that a pod could not tell from one another.
func (r *reader) checkNames(resources []Resource) {
	names, variables := map[string]*Resource{}, map[string]*Resource{}
	for i := range resources {
		res := &resources[i]
		if res.Name == "" {
			continue // has its problem already
		}
		if first := names[res.FullName()]; first != nil {
			r.fail(res.Place, "resource %s: %s in line %d has the same name", res.FullName(), first.Key, first.Line)
			continue
		}
		names[res.FullName()] = res
		if first := variables[res.variable()]; first != nil {
			r.fail(res.Place, "resource %s: containers get it as PCIDEVICE_%s, and %s, %s in line %d, too",
				res.FullName(), res.variable(), first.FullName(), first.Key, first.Line)
		}
		variables[res.variable()] = res
	}
	for i := range resources {
		res := &resources[i]
		if parts := splitForm.FindStringSubmatch(res.Name); parts != nil {
			if other := names[res.Prefix+"/"+parts[1]]; other != nil && other.splits(parts[2]) {
				r.fail(res.Place, "resource %s: %s in line %d may offer devices by this name", res.FullName(), other.Key, other.Line)
			}
		}
	}
}

// checkSplit refuses a name that has no room for the NUMA node.
func (r *reader) checkSplit(res *Resource, keys map[string]Place) {
	if most := maxName - len(ofNUMA(maxNode)); res.SplitByNUMA && len(res.Name) > most {
		r.fail(keys["resourceName"], "%+.80q: want at most %d characters with splitByNuma", res.Name, most)
	}
}

// checkDriver refuses a driver that takes away from devices what they are selected by.
func (r *reader) checkDriver(res *Resource, keys map[string]Place) {
	for _, s := range res.Selectors {
		if s.RDMA && slices.Contains([]string{"vfio-pci", "uio_pci_generic", "igb_uio"}, res.Driver) {
			r.fail(keys["driver"], "%s: a device bound to it has no RDMA, which %s.isRdma wants", res.Driver, s.Key)
		}
	}
}

// checkPFs refuses two numbers of VFs for one PF.
func (r *reader) checkPFs(pfs []pfEntry) {
	for i, pf := range pfs {
		for _, first := range pfs[:i] {
			if pf.Name == first.Name && pf.Address == first.Address && (pf.Name != "" || pf.Address.IsValid()) {
				r.fail(pf.Place, "%s in line %d is for the same PF", first.Key, first.Line)
				break
			}
		}
	}
}
