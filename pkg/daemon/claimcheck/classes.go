// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/vfconfig"
)

const classesHelp = `Print a DeviceClass for each resource of the configuration that has "api": "dra",
as YAML for kubectl apply. The command reads only the configuration and writes
nothing. The class of resource example.com/fast is named fast.example.com.

A class selects the devices of its resource, and names the resource as its
extended resource, so that pods with limits for it get a claim. The class also
carries the settings "vf" of the resource; claims can change those that
"claimMay" of the resource allows.`

func newClasses() *cobra.Command {
	var o options
	cmd := &cobra.Command{Use: "classes", Short: "Print the DeviceClasses of the resources with \"api\": \"dra\"", Long: classesHelp,
		Example: "  sriov-device-plugin classes\n  sriov-device-plugin classes --config-file config.json | kubectl apply -f -", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := poolfile.Read(o.Source)
			if err != nil {
				return err
			}
			for _, p := range config.Notes {
				fmt.Fprintln(cmd.ErrOrStderr(), p.Error())
			}
			classes, err := Classes(config)
			switch {
			case err != nil:
				return fmt.Errorf("%s: %w", o.File, err)
			case classes == "":
				return fmt.Errorf("%s: no resource has \"api\": \"dra\", so there is no class to print", o.File)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), classes)
			return err
		}}
	o.AllHosts = true // classes belong to the cluster
	poolfile.AddFlags(cmd.Flags().StringVar, &o.Source, "")
	return cmd
}

// Classes returns the DeviceClasses of the resources with the API DRA as YAML. Entries of one resource for several nodes share a class, so
// their settings must be the same.
func Classes(config *pool.Config) (string, error) {
	owner := map[string]*pool.Resource{}
	var b strings.Builder
	for i := range config.Resources {
		r := &config.Resources[i]
		if r.API != pool.DRA {
			continue
		}
		// A DNS subdomain has no upper-case letters and underscores, but the name of a resource may.
		name := strings.Trim(strings.ReplaceAll(strings.ToLower(r.Name), "_", "-"), "-") + "." + r.Prefix
		switch other := owner[name]; {
		case other == nil:
			owner[name] = r
		case other.FullName() != r.FullName():
			return "", fmt.Errorf("resources %s and %s have the same class name, %s: rename one", other.FullName(), r.FullName(), name)
		case settingsYAML(other) != settingsYAML(r):
			return "", fmt.Errorf("resource %s has other settings in vf on other nodes: a DeviceClass is for all, so rename one", r.FullName())
		default:
			continue
		}
		fmt.Fprintf(&b, `---
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
%s`, scalar(name), selectorOf(r.FullName()), r.FullName(), settingsYAML(r))
	}
	return b.String(), nil
}

// selectorOf returns the CEL expression that selects the devices of a resource. It compares the driver first, because devices of other
// drivers lack the attribute.
func selectorOf(resource string) string {
	return fmt.Sprintf(`device.driver == %q && %s == %q`, claim.Driver, attribute{claim.Driver, "resource"}.expression(), resource)
}

// scalar formats a name as a YAML string, in quotes if YAML would read it as a number.
func scalar(name string) string {
	if _, err := strconv.ParseFloat(name, 64); err == nil {
		return strconv.Quote(name)
	}
	return name
}

// settingsYAML returns the part of the class with the settings of the resource, or "". The config entry names the resource, because a claim
// may use several classes.
func settingsYAML(r *pool.Resource) string {
	if r.VF.IsZero() {
		return ""
	}
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
		fmt.Fprintf(&b, "        %s: %s\n", key, r.VF.Text(key))
	}
	return b.String()
}
