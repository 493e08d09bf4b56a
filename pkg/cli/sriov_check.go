// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/pool"
)

const sriovCheckClaimHelp = `Check the ResourceClaims, ResourceClaimTemplates and Pods in FILE, as the node would
handle them: for each request the command prints the VFs and their settings, merged
from the DeviceClass and the claim, or the error that would keep the pod waiting.

DeviceClasses come from FILE and from --class files; for missing ones the command
uses those that 'podlace sriov classes' prints for the configuration.

The command does not evaluate CEL expressions. It reports those that read an
attribute which a device may lack: the scheduler stops at such a device and starts
the pod on no node.`

type checkFlags struct {
	sriovFlags
	classFiles []string
}

func newSRIOVCheckClaim() *cobra.Command {
	var f checkFlags
	cmd := &cobra.Command{Use: "check-claim FILE", Short: "Check what the node would do with a ResourceClaim, a template or a Pod",
		Example: "  podlace sriov check-claim claim.yaml\n  podlace sriov check-claim pod.yaml --class classes.yaml",
		Long:    sriovCheckClaimHelp, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.check(args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		}}
	f.addConfig(cmd)
	addOutput(cmd, &f.output)
	cmd.Flags().StringArrayVar(&f.classFiles, "class", nil, "file with DeviceClasses; may be given several times")
	return cmd
}

func (f *checkFlags) check(file string, stdout, stderr io.Writer) error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	c, objects, err := f.load(file)
	if err != nil {
		return err
	}
	for _, m := range objects {
		c.checkObject(m)
	}
	if len(c.checked) == 0 && len(c.problems) == 0 {
		return fmt.Errorf("%s: no ResourceClaim, ResourceClaimTemplate or Pod with claims", file)
	}
	if err := f.print(c, stdout, stderr); err != nil {
		return err
	}
	if len(c.problems) > 0 {
		return exitError(exitDiffers)
	}
	return nil
}

// load() reads the device plugin's configuration, the DeviceClasses, and the Kubernetes objects to check.
func (f *checkFlags) load(file string) (*checker, []manifest, error) {
	config, err := f.parse()
	if err != nil {
		return nil, nil, err
	}
	c := &checker{resources: map[string]*pool.Resource{}}
	for i, r := range config.Resources {
		if r.API == pool.DRA {
			c.resources[r.FullName()] = &config.Resources[i]
		}
	}
	for _, name := range append(f.classFiles, file) {
		objects, err := readManifests(name)
		if err != nil {
			return nil, nil, err
		}
		c.objects = append(c.objects, objects...)
		if err := c.addClasses(objects); err != nil {
			return nil, nil, err
		}
	}
	printed, err := classesOf(config)
	for _, p := range printed {
		c.classes = append(c.classes, p.spec())
	}
	return c, slices.DeleteFunc(slices.Clone(c.objects), func(m manifest) bool { return m.file != file }), err
}

// checkedRequest describes how the node would serve one request of a claim.
type checkedRequest struct {
	Object   string    `json:"object"`
	Request  string    `json:"request"`
	Class    string    `json:"class"`
	Resource string    `json:"resource"`
	Devices  string    `json:"devices"` // how many, in words
	Settings []setting `json:"settings"`
}

// The type setting contains a setting of a VF, and the Kubernetes object that the setting comes from.
type setting struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	From  string `json:"from"`
}

func (f *checkFlags) print(c *checker, stdout, stderr io.Writer) error {
	if f.output == outputJSON {
		return printJSON(stdout, map[string]any{"requests": c.checked, "problems": c.problems})
	}
	for _, r := range c.checked {
		fmt.Fprintf(stdout, "%s: request %s: %s of %s by class %s\n", plainText(r.Object), plain(r.Request), r.Devices, plain(r.Resource),
			plain(r.Class))
		for _, s := range r.Settings {
			fmt.Fprintf(stdout, "  %s %s (%s)\n", s.Key, plainText(s.Value), plainText(s.From))
		}
	}
	for _, p := range c.problems {
		printLine(stderr, p)
	}
	return nil
}

// A checker compares Kubernetes objects with the device plugin's configuration of a node.
type checker struct {
	resources map[string]*pool.Resource // resources of DRA
	classes   []deviceClass             // if several classes have one name, the first is used
	objects   []manifest
	checked   []checkedRequest
	problems  []string
}

func (c *checker) fail(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// deviceClass is a DeviceClass. A deviceClass comes from a file, or is one of the classes that 'podlace sriov classes' prints.
type deviceClass struct {
	name, from string
	classSpec
}

func (c *checker) addClasses(objects []manifest) error {
	for _, m := range objects {
		if m.Kind != kindClass {
			continue
		}
		class := deviceClass{name: m.Metadata.Name, from: m.String()}
		if err := m.decode(&class.classSpec); err != nil {
			return err
		}
		c.classes = append(c.classes, class)
		c.checkSelectors(m.String(), class.Selectors, false)
	}
	return nil
}

// spec() converts a generated class to a deviceClass, the type for classes from files.
func (c resourceClass) spec() deviceClass {
	class := deviceClass{name: c.name, from: "DeviceClass " + c.name}
	class.ExtendedResourceName = c.resource
	class.Selectors = make([]celSelector, 1)
	class.Selectors[0].CEL.Expression = expression(c.resource)
	class.Config = c.entries()
	return class
}

// checkSelectors reports CEL expressions that may fail. The argument sure is true if the expressions see only devices of this driver.
func (c *checker) checkSelectors(where string, list []celSelector, sure bool) {
	for i, s := range list {
		for _, p := range unguarded(s.CEL.Expression, sure) {
			c.fail("%s: selectors[%d].cel.expression: %s", where, i, p)
		}
	}
}

// checkObject checks one Kubernetes object in the file.
func (c *checker) checkObject(m manifest) {
	switch m.Kind {
	case kindClaim:
		var spec claimSpec
		if err := m.decode(&spec); err != nil {
			c.fail("%v", err)
			return
		}
		c.checkSpec(m.String(), "spec.devices", spec)
	case kindTemplate:
		var spec struct {
			Spec claimSpec `json:"spec"`
		}
		if err := m.decode(&spec); err != nil {
			c.fail("%v", err)
			return
		}
		c.checkSpec(m.String(), "spec.spec.devices", spec.Spec)
	case kindPod:
		var spec podSpec
		if err := m.decode(&spec); err != nil {
			c.fail("%v", err)
			return
		}
		c.checkPod(m, spec)
	}
}

// checkPod checks that the files contain all claims in the pod's specification. checkPod also checks the extended resources of the pod.
func (c *checker) checkPod(m manifest, spec podSpec) {
	for i, pc := range spec.Claims {
		kind, name := kindClaim, pc.Claim
		if pc.Template != "" {
			kind, name = kindTemplate, pc.Template
		}
		if !slices.ContainsFunc(c.objects, func(o manifest) bool {
			return o.Kind == kind && o.Metadata.Name == name && o.Metadata.Namespace == m.Metadata.Namespace
		}) {
			c.fail("%s: spec.resourceClaims[%d]: %s %s is in none of the files and was not checked", m, i, kind, name)
		}
	}
	for _, container := range append(spec.InitContainers, spec.Containers...) {
		for name, count := range container.Resources.Limits {
			if class, ok := c.classOfExtended(name); ok {
				var spec claimSpec
				n := strings.Trim(string(count), `"`)
				request := subRequest{Class: class.name, Count: atoi(n)}
				spec.Devices.Requests = []claimRequest{{Name: name, Exactly: &request}}
				c.checkSpec(m.String()+", container "+container.Name, "resources.limits", spec)
			}
		}
	}
}

// classOfExtended returns the class that an extended resource belongs to.
func (c *checker) classOfExtended(resource string) (deviceClass, bool) {
	i := slices.IndexFunc(c.classes, func(d deviceClass) bool { return d.ExtendedResourceName == resource })
	if i < 0 {
		return deviceClass{}, false
	}
	return c.classes[i], true
}

// classNamed returns the DeviceClass with the given name.
func (c *checker) classNamed(name string) (deviceClass, error) {
	var names []string
	for _, d := range c.classes {
		if d.name == name {
			return d, nil
		}
		names = append(names, d.name)
	}
	if len(names) == 0 {
		return deviceClass{}, errors.New("there is no class")
	}
	return deviceClass{}, fmt.Errorf("class %q is not known: give its file with --class; known keys: %s", name, strings.Join(names, ", "))
}
