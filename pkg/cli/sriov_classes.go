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
		Args:    cobra.NoArgs,
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
	if err != nil {
		return fmt.Errorf("%s: %w", f.File, err)
	}
	if len(classes) == 0 {
		return fmt.Errorf("%s: no resource has \"api\": \"dra\", so there is no class to print", f.File)
	}
	for _, c := range classes {
		text, err := c.yaml()
		if err != nil {
			return err
		}
		if _, err := io.WriteString(stdout, text); err != nil {
			return err
		}
	}
	return nil
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

// resourceClass is the generated DeviceClass of a resource.
type resourceClass struct {
	name, resource string
	settings       *vfconfig.Config
}

// classesOf returns the classes for those resources that are offered through DRA.
func classesOf(config *pool.Config) (classes []resourceClass, err error) {
	owner := map[string]string{}
	for _, r := range config.Resources {
		if r.API != pool.DRA {
			continue
		}
		c := resourceClass{className(r), r.FullName(), r.VF}
		if other := owner[c.name]; other != "" {
			return nil, fmt.Errorf("resources %s and %s have the same class name, %s: rename one", other, c.resource, c.name)
		}
		owner[c.name] = c.resource
		classes = append(classes, c)
	}
	return classes, nil
}

// className converts the name of a resource to a DNS subdomain. The name of a resource may contain upper-case letters and underscores,
// which a DNS subdomain cannot contain.
func className(r pool.Resource) string {
	name := strings.Trim(strings.ReplaceAll(strings.ToLower(r.Name), "_", "-"), "-")
	return name + "." + r.Prefix
}

// expression() returns a CEL expression that selects the devices of a resource. The CEL expression compares the driver first, because
// devices of other drivers do not have the attribute "resource".
func expression(resource string) string {
	return fmt.Sprintf(`device.driver == %q && device.attributes[%q].resource == %q`, claim.Driver, claim.Driver, resource)
}

// yaml() formats the class as a YAML document.
func (c resourceClass) yaml() (string, error) {
	config, err := c.configYAML()
	return fmt.Sprintf(`---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata:
  name: %s
spec:
  selectors:
  - cel:
      expression: >-
        %s
  extendedResourceName: %s
%s`, scalar(c.name), expression(c.resource), c.resource, config), err
}

// scalar() formats a name as a YAML string. A name such as 1.2 is put in quotes, because YAML would read 1.2 as a number.
func scalar(name string) string {
	if _, err := strconv.ParseFloat(name, 64); err == nil {
		return strconv.Quote(name)
	}
	return name
}

// configYAML returns the part of the class that contains the resource's settings. configYAML returns "" if the resource has no settings.
// The config entry contains the name of the resource. If a claim uses several classes, the settings therefore apply only to VFs of this
// resource.
func (c resourceClass) configYAML() (string, error) {
	if c.settings.IsZero() {
		return "", nil
	}
	data, err := json.Marshal(c.settings)
	if err != nil {
		return "", err
	}
	values := map[string]json.RawMessage{}
	if err := json.Unmarshal(data, &values); err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `  config:
  - opaque:
      driver: %s
      parameters:
        apiVersion: %s
        kind: %s
        resource: %s
`, claim.Driver, vfconfig.APIVersion, vfconfig.Kind, c.resource)
	for _, key := range c.settings.Set() {
		fmt.Fprintf(&b, "        %s: %s\n", key, values[key])
	}
	return b.String(), nil
}
