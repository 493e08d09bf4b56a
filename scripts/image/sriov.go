// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/template"

	kustomize "sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
)

// sriovChecks fails if the components cannot serve a configuration. The chart contains it, and check executes it.
const sriovChecks = `{{- with .Values.sriovConfig }}
{{- $dra := false }}{{ $needs := "" }}
{{- range .resourceList }}{{ if .driver }}{{ $needs = "driver" }}{{ end }}{{ if eq "dra" (print .api) }}{{ $dra = true }}{{ end }}{{ end }}
{{- range .pfs }}{{ if .numVfs }}{{ $needs = "numVfs" }}{{ end }}{{ end }}
{{- if not .resourceList }}{{ fail "resourceList: want at least one resource" }}
{{- else if not (or $.Values.sriov $.Values.dra) }}{{ fail "a configuration of the SR-IOV device plugin needs the component sriov or dra" }}
{{- else if and $dra (not $.Values.dra) }}
{{- fail "the configuration has a resource with \"api\": \"dra\", which needs the component dra in place of sriov" }}
{{- else if and $.Values.dra (not $dra) }}
{{- fail "no resource of the configuration has \"api\": \"dra\": use the component sriov in place of dra" }}
{{- else if and $needs (not $.Values.privileged) }}
{{- fail (printf "the configuration has the key %s, which needs write access to sysfs: add the component privileged" $needs) }}
{{- end }}{{ end }}
`

// sriovConfig is a configuration of the SR-IOV device plugin, and what the manifest derives from it.
type sriovConfig struct {
	text, classes string                      // config.json and its DeviceClasses, "" without a resource of the API "dra"
	resources     []string                    // with prefix, for the conflist
	split         []string                    // resources with splitByNuma
	checked       map[string][]map[string]any // the keys that sriovChecks reads
}

// readSRIOVConfig reads a configuration as the device plugin does. What this would refuse or ignore is an error.
func readSRIOVConfig(file string) (*sriovConfig, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	config, err := pool.Parse(pool.Source{File: file, Prefix: poolfile.DefaultPrefix, AllHosts: true}, text)
	if err != nil {
		return nil, err
	}
	c := &sriovConfig{text: string(text), checked: map[string][]map[string]any{"resourceList": nil}}
	for _, r := range config.Resources {
		if !slices.Contains(c.resources, r.FullName()) {
			c.resources = append(c.resources, r.FullName())
		}
		if r.SplitByNUMA {
			c.split = append(c.split, r.FullName())
		}
		c.checked["resourceList"] = append(c.checked["resourceList"], map[string]any{"driver": r.Driver, "api": r.API})
	}
	for _, pf := range config.PFs {
		c.checked["pfs"] = append(c.checked["pfs"], map[string]any{"numVfs": pf.NumVFs})
	}
	if c.classes, err = claimcheck.Classes(config); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

// check returns an error if the components cannot serve the configuration.
func (c *sriovConfig) check(components []string) (err error) {
	values := map[string]any{"sriovConfig": c.checked}
	for _, name := range components {
		values[name] = true
	}
	fail := func(why string) string { err = errors.New(why); return "" }
	checks := template.Must(template.New("").Funcs(template.FuncMap{"fail": fail}).Parse(sriovChecks))
	failed := checks.Execute(io.Discard, map[string]any{"Values": values})
	return errors.Join(failed, err)
}

// note returns what the user must still do by hand, or "".
func (c *sriovConfig) note() string {
	if c == nil || len(c.split) == 0 {
		return ""
	}
	return fmt.Sprintf("note: %s: splitByNuma: add the names of the parts, such as %s_numa0, to \"resources\" of podlace-sriov",
		strings.Join(c.split, ", "), c.split[0])
}

// addTo puts the configuration, its DeviceClasses and its resources in the place of the shipped examples.
func (c *sriovConfig) addTo(files filesys.FileSystem, overlay *kustomize.Kustomization) error {
	const conflist = "/sriov-conflist/10-podlace.conflist"
	shipped, err := files.ReadFile(conflist)
	if err != nil {
		return err
	}
	names, err := json.Marshal(c.resources)
	if err != nil {
		return err
	}
	patch, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "data": map[string]string{"config.json": c.text},
		"metadata": map[string]string{"name": "sriov-device-plugin", "namespace": "podlace"}})
	overlay.Patches = append(overlay.Patches, kustomize.Patch{Patch: string(patch)})
	return errors.Join(err, files.WriteFile(conflist, bytes.Replace(shipped, []byte(shippedResources), names, 1)),
		files.WriteFile("/components/dra/deviceclass.yaml", []byte(c.classes)))
}
