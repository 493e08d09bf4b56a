// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// componentRule excludes a component together with those in `without`, and requires one of those in `oneOf`.
type componentRule struct {
	component string
	without   []string // components that the component excludes
	oneOf     []string // components of which the component needs one
	reason    string
}

func rules() []componentRule {
	return []componentRule{
		{component: "k3s", without: []string{"crio"}, reason: "each names the folder of the plugins"},
		{component: "sriov", without: []string{"dra"},
			reason: `each contains the DaemonSet sriov-device-plugin, and that of dra also serves resources without "api": "dra"`},
		{component: "noroutes", without: []string{"removal"}, reason: "the removal needs the rights that noroutes drops"},
		{component: "noroutes", without: []string{"vxlan"}, reason: "the tunnel needs routes of the agent"},
		{component: "debug", without: []string{"removal"}, reason: "the removal has the rights already"},
		{component: "noagent", without: []string{"crio", "debug", "k3s", "noroutes", "removal", "vxlan"},
			reason: "the cluster keeps its network"},
		{component: "noagent", oneOf: []string{"dra", "sriov"}, reason: "nothing else is left without the agent"},
		{component: "openshift", without: []string{"crio", "debug", "k3s", "noagent", "noroutes", "removal", "vxlan"},
			reason: "openshift leaves the cluster network to OpenShift, and has no podlace-node"},
		{component: "openshift", oneOf: []string{"dra", "sriov"}, reason: "openshift adapts the DaemonSet sriov-device-plugin to OpenShift"},
		{component: "privileged", oneOf: []string{"dra", "sriov"}, reason: "only the DaemonSet sriov-device-plugin can become privileged"},
	}
}

// violation returns an error text with the components that break the rule.
func (r componentRule) violation(chosen string) string {
	if len(r.oneOf) > 0 {
		return fmt.Sprintf("component %s needs %s: %s", r.component, strings.Join(r.oneOf, " or "), r.reason)
	}
	return fmt.Sprintf("components %s and %s exclude each other: %s", r.component, chosen, r.reason)
}

// checkComponents returns an error for unknown or incompatible components.
func checkComponents(known, chosen []string) error {
	for _, c := range chosen {
		if !slices.Contains(known, c) {
			return fmt.Errorf("no component %q; there are %s", c, strings.Join(known, ", "))
		}
	}
	has := func(c string) bool { return slices.Contains(chosen, c) }
	for _, r := range rules() {
		if !has(r.component) {
			continue
		}
		if i := slices.IndexFunc(r.without, has); i >= 0 {
			return fmt.Errorf("%s", r.violation(r.without[i]))
		}
		if len(r.oneOf) > 0 && !slices.ContainsFunc(r.oneOf, has) {
			return fmt.Errorf("%s", r.violation(""))
		}
	}
	return nil
}

// inOrder sorts components by name. Those that patch objects of the other components are last.
func inOrder(components []string) []string {
	last := []string{"debug", "noagent", "openshift", "privileged"}
	return slices.SortedFunc(slices.Values(slices.Compact(slices.Sorted(slices.Values(components)))), func(a, b string) int {
		return cmp.Or(cmp.Compare(slices.Index(last, a), slices.Index(last, b)), cmp.Compare(a, b))
	})
}

func componentNames(conf string) (names []string, err error) {
	folders, err := os.ReadDir(filepath.Join(conf, "components"))
	for _, f := range folders {
		names = append(names, f.Name())
	}
	return names, err
}
