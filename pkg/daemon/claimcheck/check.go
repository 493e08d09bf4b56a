// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// A checker compares Kubernetes objects with the devices of a node or of a cluster.
type checker struct {
	cluster
	ctx       context.Context //nolint:containedctx // of one run of the command
	own       map[attribute]any
	resources map[string]*pool.Resource // of DRA
	refused   map[string][]string       // what the plugin sriov refuses, by resource
	compiled  *cel.Cache
	classes   []class // if several classes have one name, the first is used
	objects   []manifest
	claims    map[[3]string][]served // by kind, namespace and name
	served    []served
	problems  []string
	notices   []string
	printed   string // DeviceClasses of the configuration
	checked   int    // claims, templates and classes
}

// A class is a DeviceClass of a file, or one that the command classes prints.
type class struct {
	resourceapi.DeviceClass
	selectors []selector
	sound     bool // the selectors can be evaluated
}

// served describes how the node would serve one request of a claim.
type served struct {
	Object   string    `json:"object"`
	Request  string    `json:"request"`
	Class    string    `json:"class"`
	Resource string    `json:"resource"`
	Devices  string    `json:"devices"` // how many, in words
	Settings []setting `json:"settings"`
}

// setting is a setting of a VF and the Kubernetes object that it comes from.
type setting struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	From  string `json:"from"`
}

func newChecker(ctx context.Context, o *options, config *pool.Config) (*checker, error) {
	c := &checker{ctx: ctx, own: ownAttributes(), resources: map[string]*pool.Resource{}, refused: map[string][]string{},
		claims: map[[3]string][]served{}, compiled: cel.NewCache(1000, celFeatures())}
	for i, r := range config.Resources {
		if r.API == pool.DRA {
			c.resources[r.FullName()] = &config.Resources[i]
		}
	}
	var err error
	if c.cluster, err = c.loadCluster(o, config); err != nil {
		return nil, err
	}
	c.printed, err = Classes(config)
	return c, err
}

func (c *checker) fail(format string, args ...any) { add(&c.problems, format, args...) }

func (c *checker) notice(format string, args ...any) { add(&c.notices, format, args...) }

// lack reports that devices are missing. Among examples this is only a notice.
func (c *checker) lack(format string, args ...any) {
	if c.example {
		c.notice(format+", among examples of VFs: check it with --slices, or on a node with VFs", args...)
	} else {
		c.fail(format, args...)
	}
}

func add(to *[]string, format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(*to, text) {
		*to = append(*to, text)
	}
}

// read reads the files and collects their classes, followed by those that the command classes prints.
func (c *checker) read(stdin io.Reader, classFiles, files []string) (err error) {
	for _, name := range classFiles {
		objects, unread := c.readManifests(stdin, name)
		if unread == nil && !slices.ContainsFunc(objects, func(m manifest) bool { return m.kind() == kindClass }) {
			unread = fmt.Errorf("%s: no DeviceClass", name)
		}
		err = errors.Join(err, unread)
		c.addClasses(objects)
	}
	for _, name := range files {
		objects, unread := c.readManifests(stdin, name)
		c.objects, err = append(c.objects, objects...), errors.Join(err, unread)
	}
	c.addClasses(c.objects)
	c.addClasses(c.parseManifests("sriov-device-plugin classes", []byte(c.printed)))
	return err
}

func (c *checker) addClasses(list []manifest) {
	for _, m := range list {
		var one class
		if one.Name = m.name(); m.kind() != kindClass || !c.decodeSpec(m, &one.Spec) {
			continue
		}
		entries := make([]resourceapi.DeviceClaimConfiguration, len(one.Spec.Config))
		for i, e := range one.Spec.Config {
			entries[i].DeviceConfiguration = e.DeviceConfiguration
		}
		c.checkEntries(m, "spec", entries)
		list, valid := c.compile(m, "spec", one.Spec.Selectors)
		one.selectors = list
		if one.sound = valid && (c.otherDriver(list) != "" || c.checkReads(list)); one.sound {
			_, one.sound = c.matching(one.selectors)
		}
		c.classes = append(c.classes, one)
	}
}

// class returns the first DeviceClass that matches.
func (c *checker) class(match func(class) bool) (class, bool) {
	i := slices.IndexFunc(c.classes, match)
	if i < 0 {
		return class{}, false
	}
	return c.classes[i], true
}

func (c *checker) classNamed(name string) (class, bool) {
	return c.class(func(d class) bool { return d.Name == name })
}

func (c *checker) List() (list []*resourceapi.DeviceClass, err error) {
	for i := range c.classes {
		list = append(list, &c.classes[i].DeviceClass)
	}
	return list, nil
}

func (c *checker) Get(name string) (*resourceapi.DeviceClass, error) {
	one, ok := c.classNamed(name)
	if !ok {
		return nil, fmt.Errorf("no class %s", name)
	}
	if c.example { // examplesOf selects the devices
		one.Spec.Selectors = nil
	}
	return &one.DeviceClass, nil
}

// checkAll checks the objects, and then the pods that use them.
func (c *checker) checkAll() {
	named := map[[3]string]bool{}
	for _, m := range c.objects {
		if named[m.id()] {
			c.fail("%s: another %s has this name", m.at("metadata.name"), m.kind())
		}
		named[m.id()] = m.name() != "" && m.root.Get("apiVersion").Text() == claimAPI
		if m.lacksName() {
			c.fail("%s is missing: the API server wants a name", m.at("metadata.name"))
		}
		c.checkObject(m)
	}
	for _, m := range c.objects {
		c.checkPods(m)
	}
	if c.example && len(c.served) > 0 {
		c.notice("no VF with \"api\": \"dra\" is on this node, so it was not checked how many VFs match: give --slices, or run it on such a node")
	}
}

// checkObject checks a claim or a template.
func (c *checker) checkObject(m manifest) {
	switch m.kind() {
	case kindClaim, kindTemplate:
		var spec resourceapi.ResourceClaimTemplateSpec
		path, to := "spec.spec.devices", any(&spec)
		if m.kind() == kindClaim {
			path, to = "spec.devices", &spec.Spec
		}
		if c.decodeSpec(m, to) {
			c.claims[m.id()] = c.checkDevices(m, path, spec.Spec.Devices)
		}
	case kindClass: // addClasses has checked it
		c.checked++
	default:
		near := strict.Nearest(m.kind(), []string{kindClaim, kindTemplate, kindClass})
		if near != "" && m.root.Get("apiVersion").Text() == claimAPI {
			c.fail("%s: %q: did you mean %s?", m.at("kind"), m.kind(), near)
		}
	}
}

// checkEntries checks the config entries of a claim or class for this driver, and removes settings that it cannot decode.
func (c *checker) checkEntries(m manifest, path string, list []resourceapi.DeviceClaimConfiguration) {
	for i, e := range list {
		at := fmt.Sprintf("%s.config[%d].opaque", path, i)
		if e.Opaque == nil {
			c.fail("%s is missing", m.at(at))
			continue
		}
		project, raw := replaced()[e.Opaque.Driver], e.Opaque.Parameters.Raw
		switch {
		case e.Opaque.Driver == claim.Driver:
			_, err := vfconfig.Decode(raw, at+".parameters")
			values := map[string]json.RawMessage{}
			_ = json.Unmarshal(raw, &values) // Decode reports a fault
			var problems strict.Problems
			errors.As(err, &problems)
			for _, p := range problems {
				c.fail("%s: %s", m.at(p.Key), p.Text)
				delete(values, strings.TrimPrefix(p.Key, at+".parameters."))
			}
			e.Opaque.Parameters.Raw, _ = json.Marshal(values) // the rest of the entry is checked
		case isMisspeltDriver(e.Opaque.Driver) || bytes.Contains(raw, []byte(vfconfig.APIVersion)):
			c.fail("%s: %q: did you mean %s?", m.at(at+".driver"), e.Opaque.Driver, claim.Driver)
		case project != "" && !c.drivers[e.Opaque.Driver]:
			c.fail("%s: the driver is that of %s: for VFs of Podlace write %s, with parameters of apiVersion %s and kind %s; their keys are %s",
				m.at(at+".driver"), project, claim.Driver, vfconfig.APIVersion, vfconfig.Kind, strings.Join(vfconfig.Keys(), ", "))
		}
	}
}

// unknownClass reports a class that is in no file. It may belong to another driver, so it is a problem only if the claim has settings
// for the request or the name resembles a known one.
func (c *checker) unknownClass(where, name string, withSettings bool) {
	label, suffix, _ := strings.Cut(name, ".")
	var names, labels []string
	for _, d := range c.classes {
		names = append(names, d.Name)
		if first, rest, _ := strings.Cut(d.Name, "."); rest == suffix {
			labels = append(labels, first)
		}
	}
	switch near := strict.Nearest(label, labels); {
	case near != "":
		c.fail("%s: class %q is not known; did you mean %s? Otherwise give its file with --class", where, name, strings.TrimSuffix(near+"."+suffix, "."))
	case withSettings:
		c.fail("%s: class %q is not known, so the settings for its VFs were not checked: give its file with --class; known classes: %s", where, name,
			strings.Join(names, ", "))
	case replaced()[name] != "" && !c.drivers[name]:
		c.fail("%s: class %q belongs to %s: write the class of a resource: %s", where, name, replaced()[name], strings.Join(names, ", "))
	default:
		c.notice("%s: class %q is not known and was not checked; if it selects VFs, give its file with --class", where, name)
	}
}
