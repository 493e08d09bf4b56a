// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/strict"
)

const sriovCheckClaimHelp = `Check the ResourceClaims, ResourceClaimTemplates, DeviceClasses, Pods and pod
templates in FILE, as the node would handle them: for each request the command
prints the VFs and their settings, merged from the DeviceClass and the claim, or the
error that would keep the pod waiting. FILE may be a folder, or - for standard input.

DeviceClasses come from FILE and from --class files; for missing ones the command
uses those that 'podlace sriov classes' prints for the configuration.

The command does not evaluate CEL expressions. It reports those that read an
attribute which no VF has or which a device may lack: the scheduler stops at such a
device and starts the pod on no node.

A notice describes a part of FILE that the command cannot check. Notices do not
change the exit status.`

type checkFlags struct {
	sriovFlags
	classFiles []string
}

func newSRIOVCheckClaim() *cobra.Command {
	var f checkFlags
	cmd := &cobra.Command{Use: "check-claim FILE", Short: "Check what the node would do with a ResourceClaim, a template or a Pod",
		Example: "  podlace sriov check-claim claim.yaml\n  podlace sriov check-claim pod.yaml --class classes.yaml\n" +
			"  helm template chart | podlace sriov check-claim -",
		Long: sriovCheckClaimHelp, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.check(args[0], cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		}}
	f.addConfig(cmd)
	addOutput(cmd, &f.output)
	cmd.Flags().StringArrayVar(&f.classFiles, "class", nil, "file with DeviceClasses; may be given several times")
	return cmd
}

func (f *checkFlags) check(file string, stdin io.Reader, stdout, stderr io.Writer) error {
	config, err := f.parse()
	if err != nil {
		return err
	}
	printed, err := classesOf(config)
	if err != nil {
		return err
	}
	c := &checker{resources: map[string]*pool.Resource{}}
	for i, r := range config.Resources {
		if r.API == pool.DRA {
			c.resources[r.FullName()] = &config.Resources[i]
		}
	}
	var own []manifest
	for i, name := range append(slices.Clone(f.classFiles), file) {
		objects, unread := c.readManifests(stdin, name)
		if i < len(f.classFiles) && unread == nil && !slices.ContainsFunc(objects, func(m manifest) bool { return m.kind() == kindClass }) {
			unread = fmt.Errorf("%s: no DeviceClass", name)
		}
		own, c.objects, err = objects, append(c.objects, objects...), errors.Join(err, unread)
	}
	for _, m := range append(slices.Clone(c.objects), c.parseManifests("podlace sriov classes", []byte(printed))...) {
		c.addClass(m)
	}
	c.checkNames(own)
	for _, m := range own {
		c.checkObject(m)
	}
	if c.read == 0 && len(c.problems) == 0 && err == nil {
		return fmt.Errorf("%s: no ResourceClaim, ResourceClaimTemplate, DeviceClass or Pod with claims", file)
	}
	if err = errors.Join(err, f.print(c, stdout, stderr)); err == nil && len(c.problems) > 0 {
		return exitError(exitDiffers)
	}
	return err
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
		return printJSON(stdout, map[string]any{"requests": append([]checkedRequest{}, c.checked...),
			"problems": append([]string{}, c.problems...), "notices": append([]string{}, c.notices...)})
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
	for _, n := range c.notices {
		printLine(stderr, "notice: "+n)
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
	notices   []string
	read      int // claims, templates and classes that were checked
}

func (c *checker) fail(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

func (c *checker) notice(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(c.notices, text) {
		c.notices = append(c.notices, text)
	}
}

// deviceClass is a DeviceClass. A deviceClass comes from a file, or is one of the classes that 'podlace sriov classes' prints.
type deviceClass struct {
	name string
	classSpec
	entries []*claimEntry // for this driver
}

func (c *checker) addClass(m manifest) {
	class := deviceClass{name: m.name()}
	if m.kind() != kindClass || !c.decodeSpec(m, &class.classSpec) {
		return
	}
	c.checkSelectors(m, "spec", class.Selectors, false)
	var config []configEntry
	for _, e := range class.Config {
		config = append(config, configEntry{classConfig: e})
	}
	class.entries = c.ownEntries(m, "spec", config)
	c.classes = append(c.classes, class)
}

// checkSelectors reports CEL expressions that may fail. The argument `sure` is true if the expressions are evaluated only for devices of
// this driver.
func (c *checker) checkSelectors(m manifest, path string, list []celSelector, sure bool) {
	for i, s := range list {
		for _, p := range celProblems(s.CEL.Expression, sure) {
			c.fail("%s: %s", m.at(fmt.Sprintf("%s.selectors[%d].cel.expression", path, i)), p)
		}
	}
}

// class returns the first DeviceClass that matches.
func (c *checker) class(match func(deviceClass) bool) (deviceClass, bool) {
	i := slices.IndexFunc(c.classes, match)
	if i < 0 {
		return deviceClass{}, false
	}
	return c.classes[i], true
}

// unknownClass reports a class that is in none of the files. The class may belong to another driver. An unknown class is a problem only if
// the claim has settings for the request, or if the name resembles the name of a known class.
func (c *checker) unknownClass(where, name string, withSettings bool) {
	label, suffix, _ := strings.Cut(name, ".")
	var names, labels []string
	for _, d := range c.classes {
		names = append(names, d.name)
		if first, rest, _ := strings.Cut(d.name, "."); rest == suffix {
			labels = append(labels, first)
		}
	}
	switch near := strict.Nearest(label, labels); {
	case near != "":
		c.fail("%s: class %q is not known; did you mean %s? Otherwise give its file with --class", where, name, strings.TrimSuffix(near+"."+suffix, "."))
	case withSettings:
		c.fail("%s: class %q is not known, so the settings for its VFs were not checked: give its file with --class; known classes: %s", where, name,
			strings.Join(names, ", "))
	default:
		c.notice("%s: class %q is not known and was not checked; if it selects VFs, give its file with --class", where, name)
	}
}
