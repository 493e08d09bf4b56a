// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/vfconfig"
)

const sriovClassesHelp = `Print a DeviceClass for each resource of the configuration that has "api": "dra",
as YAML for kubectl apply. The command reads only the configuration and writes
nothing. The class of resource example.com/fast is named fast.example.com.

A class selects the devices of its resource, and names the resource as its
extended resource, so that pods with limits for it get a claim. The class also
carries the settings "vf" of the resource; claims can change those that
"claimMay" of the resource allows.`

func newSRIOVClasses() *cobra.Command {
	var f sriovFlags
	cmd := &cobra.Command{Use: "classes", Short: "Print the DeviceClasses of the resources with \"api\": \"dra\"", Long: sriovClassesHelp,
		Example: "  podlace sriov classes\n  podlace sriov classes --config-file config.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.classes(cmd.OutOrStdout(), cmd.ErrOrStderr())
		}}
	f.addConfig(cmd)
	return cmd
}

func (f *sriovFlags) classes(stdout, stderr io.Writer) error {
	config, err := f.parse()
	if err != nil {
		return err
	}
	for _, p := range config.Notes {
		printLine(stderr, p.Error())
	}
	classes, err := classesOf(config)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", f.File, err)
	case classes == "":
		return fmt.Errorf("%s: no resource has \"api\": \"dra\", so there is no class to print", f.File)
	}
	_, err = io.WriteString(stdout, classes)
	return err
}

// parse() parses the device plugin's configuration file.
func (f *sriovFlags) parse() (*pool.Config, error) {
	data, err := store.ReadFile(f.File)
	if err == nil {
		var config *pool.Config
		if config, err = pool.Parse(f.Source, data); err == nil {
			return config, nil
		}
	}
	return nil, fmt.Errorf("read the configuration of the device plugin (--config-file): %w", err)
}

// classesOf returns, as YAML, the DeviceClasses of those resources that are offered through DRA. The CEL expression compares the driver
// first, because devices of other drivers do not have the attribute "resource".
func classesOf(config *pool.Config) (string, error) {
	owner := map[string]string{}
	var b strings.Builder
	for _, r := range config.Resources {
		if r.API != pool.DRA {
			continue
		}
		// A DNS subdomain cannot contain upper-case letters and underscores, which the name of a resource may have.
		name := strings.Trim(strings.ReplaceAll(strings.ToLower(r.Name), "_", "-"), "-") + "." + r.Prefix
		if other := owner[name]; other != "" {
			return "", fmt.Errorf("resources %s and %s have the same class name, %s: rename one", other, r.FullName(), name)
		}
		owner[name] = r.FullName()
		fmt.Fprintf(&b, `---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: %s
spec:
  selectors:
  - cel:
      expression: >-
        device.driver == %q && device.attributes[%[2]q].resource == %[3]q
  extendedResourceName: %[3]s
%[4]s`, scalar(name), claim.Driver, r.FullName(), settingsYAML(r))
	}
	return b.String(), nil
}

// scalar() formats a name as a YAML string. A name such as 1.2 is put in quotes, because YAML would read 1.2 as a number.
func scalar(name string) string {
	if _, err := strconv.ParseFloat(name, 64); err == nil {
		return strconv.Quote(name)
	}
	return name
}

// settingsYAML returns the part of the class with the settings of the resource, or "". The config entry names the resource, because a claim
// may use several classes.
func settingsYAML(r pool.Resource) string {
	if r.VF.IsZero() {
		return ""
	}
	data, _ := json.Marshal(r.VF) // what was decoded can be encoded
	values := map[string]json.RawMessage{}
	_ = json.Unmarshal(data, &values)
	var b strings.Builder
	fmt.Fprintf(&b, `  config:
  - opaque:
      driver: %s
      parameters:
        apiVersion: %s
        kind: %s
        resource: %s
`, claim.Driver, vfconfig.APIVersion, vfconfig.Kind, r.FullName())
	for _, key := range r.VF.Set() {
		fmt.Fprintf(&b, "        %s: %s\n", key, values[key])
	}
	return b.String()
}
