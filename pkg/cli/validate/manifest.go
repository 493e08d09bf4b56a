// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// manifests checks those objects in a file of YAML documents that Podlace uses.
func (c *checker) manifests(t part) {
	documents, err := yamlfile.Read(t.file, t.data)
	known, before := 0, len(c.problems)
	r := strict.Report{File: t.file}
	for _, d := range documents {
		known += c.object(t, d, "")
		r.Duplicates(d)
	}
	for _, p := range r.Problems {
		c.add(t, p.Place, plugin.DuplicateKey, true, "%s", p.Text+lastCounts)
	}
	var wrong strict.Problems
	switch {
	case errors.As(err, &wrong):
		c.add(t, wrong[0].Place, syntax, true, "%s", wrong[0].Text)
	case known == 0 && len(c.problems) == before:
		c.add(t, strict.Place{}, unknownFile, false, "there is nothing here that this command checks: no network, no pod, "+
			"no configuration of sriov-device-plugin; 'podlace sriov check-claim' checks DeviceClasses")
	}
}

// podKeys holds the keys of a pod that decide about its network.
type podKeys struct {
	Metadata struct {
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		HostNetwork    bool            `json:"hostNetwork"`
		InitContainers []containerKeys `json:"initContainers"`
		Containers     []containerKeys `json:"containers"`
	} `json:"spec"`
}

type containerKeys struct {
	Ports []struct {
		HostPort json.RawMessage `json:"hostPort"` // hostPort() checks it
		Protocol string          `json:"protocol"`
		HostIP   string          `json:"hostIP"`
	} `json:"ports"`
}

// keys reports values whose type is not their field's, and unknown keys that resemble a field.
func (c *checker) keys(t part, v strict.Value, fields reflect.Type) {
	var r strict.Report
	plugin.CheckKeys(&r, v, fields, func(v strict.Value, known []string) {
		if near := strict.Nearest(v.Name, known); near != "" {
			c.add(t, v.Place, plugin.UnknownKey, true, "unknown key; did you mean %s?", near)
		}
	})
	for _, p := range r.Problems {
		if p.Text != strict.Duplicate { // manifests() reports it
			c.add(t, p.Place, wrongType, true, "%s", p.Text)
		}
	}
}

// kinds contains each kind of object that Podlace knows, with the path to its pod template if it has one. List is a list of kind "".
func kinds() map[string][]string {
	template := []string{"spec", "template"}
	return map[string][]string{"Pod": {}, "Deployment": template, "DaemonSet": template, "StatefulSet": template, "ReplicaSet": template,
		"ReplicationController": template, "Job": template, "CronJob": {"spec", "jobTemplate", "spec", "template"}, "": nil, "ConfigMap": nil,
		"NetworkAttachmentDefinition": nil, "ResourceClaim": nil, "ResourceClaimTemplate": nil, "DeviceClass": nil}
}

// object checks a Kubernetes object and returns how many parts of it Podlace uses. kind applies if the object names none, as in a list of
// an API server.
func (c *checker) object(t part, o strict.Value, kind string) (known int) {
	kind = cmp.Or(o.Get("kind").Text(), kind)
	of, list := strings.CutSuffix(kind, "List")
	if _, ok := kinds()[of]; ok && list { // AllowList may be a custom resource
		c.keys(t, o, reflect.TypeFor[struct {
			Items []struct{} `json:"items"`
		}]())
		for _, item := range o.Get("items").Items() {
			known += c.object(t, item, of)
		}
		return known
	}
	t.object, t.key = o.Key+".", strings.TrimSpace(kind+" "+o.Get("metadata", "name").Text())
	if path := kinds()[kind]; path != nil {
		c.pod(t, o, path)
		return 1
	}
	switch kind {
	case "NetworkAttachmentDefinition":
		t.nad = cmp.Or(o.Get("metadata", "name").Text(), "name")
		t.resource = o.Get("metadata", "annotations", resourceName).Text()
		c.definitions = append(c.definitions, definition{namespaceOf(o), t.nad, t.resource})
		c.keys(t, o.Get("spec"), reflect.TypeFor[struct {
			Config string `json:"config"`
		}]())
		members, _ := o.Get("spec").Data.(strict.Object)
		for _, v := range members {
			if strict.Nearest(v.Name, []string{"config"}) == "" { // keys() reports the others
				c.add(t, v.Place, plugin.UnknownKey, false, "unknown key; did you mean config?")
			}
		}
		if config := o.Get("spec", "config"); config.Text() != "" { // otherwise Multus looks for a file on the node
			c.json(t.inside(config, "spec.config"))
		}
		return 1
	case "ConfigMap":
		return c.configMap(t, o)
	case "ResourceClaim", "ResourceClaimTemplate": // a DeviceClass is also in Podlace's own manifest
		c.add(t, o.Place, otherChecker, false, "use 'podlace sriov check-claim' for this object")
	}
	return 0
}

// configMap checks the values of a ConfigMap that are JSON configurations.
func (c *checker) configMap(t part, o strict.Value) (known int) {
	data, _ := o.Get("data").Data.(strict.Object)
	for _, value := range data {
		if strings.HasSuffix(value.Name, ".conflist") || value.Name == "node.json" || strings.Contains(value.Text(), `"resourceList"`) {
			c.json(t.inside(value, "data."+value.Name))
			known++
		}
	}
	return known
}

// inside returns a part with the text of a YAML value. That of a block scalar starts on a line after its key, which inside finds.
func (t part) inside(value strict.Value, key string) part {
	inner := part{file: t.file, line: t.line + value.Line - 1, total: t.total, key: t.key + ": " + key, nad: t.nad, resource: t.resource,
		data: []byte(value.Text()), source: t.source}
	first := bytes.TrimSpace(lineOf(inner.data, 1))
	for after := range 3 {
		if bytes.Contains(lineOf(t.source, inner.line+1+after), first) {
			inner.line += after
			break
		}
	}
	return inner
}

// pod checks what the plugins get from a pod, or from the pod template at a path: bandwidth limits and hostPorts.
func (c *checker) pod(t part, object strict.Value, path []string) {
	pod := object.Get(path...)
	spec := pod.Get("spec")
	annotations, _ := pod.Get("metadata", "annotations").Data.(strict.Object)
	c.keys(t, pod, reflect.TypeFor[podKeys]())
	for _, a := range annotations {
		c.annotation(t, a, spec.Get("hostNetwork").Data == true)
	}
	for _, key := range limitKeys {
		if label := pod.Get("metadata", "labels", key); label.Data != nil {
			c.add(t, label.Place, unknownAnnotation, false, "no program reads this label: write it as an annotation")
		}
		if outer := object.Get("metadata", "annotations", key); outer.Data != nil && len(path) > 0 {
			c.add(t, outer.Place, unknownAnnotation, false, "no program reads this annotation here: write it below %s", strings.Join(path, "."))
		}
	}
	if spec.Data == nil {
		key := strings.Join(append(slices.Clone(path), "spec"), ".")
		c.add(t, object.At(strings.TrimPrefix(object.Key+"."+key, ".")), noSpec, true, "%s is missing", key)
	}
	c.hostPorts(t, spec)
	networks := pod.Get("metadata", "annotations", "k8s.v1.cni.cncf.io/networks")
	c.pods = append(c.pods, podNetworks{t, namespaceOf(object), networks, limitsOf(spec)})
}

// namespaceOf returns the namespace of an object, which kubectl takes for default if none is named.
func namespaceOf(o strict.Value) string {
	return cmp.Or(o.Get("metadata", "namespace").Text(), "default")
}

// limitsOf returns the names of the resources in the limits of a pod's containers.
func limitsOf(spec strict.Value) (names []string) {
	for _, list := range []string{"initContainers", "containers"} {
		for _, container := range spec.Get(list).Items() {
			limits, _ := container.Get("resources", "limits").Data.(strict.Object)
			for _, v := range limits {
				names = append(names, v.Name)
			}
		}
	}
	return names
}

// limitKeys are the annotations with a pod's bandwidth limits.
var limitKeys = []string{"kubernetes.io/ingress-bandwidth", "kubernetes.io/egress-bandwidth"}

func (c *checker) annotation(t part, a strict.Value, hostNetwork bool) {
	if !slices.Contains(limitKeys, a.Name) {
		prefix, _, _ := strings.Cut(a.Name, "/")
		if near := strict.Nearest(a.Name, limitKeys); near != "" && prefix != "k8s.v1.cni.cncf.io" {
			c.add(t, a.Place, unknownAnnotation, false, "no program reads this annotation; did you mean %s?", near)
		}
		return
	}
	if _, err := bandwidth.ParseRate(a.Text()); err != nil || a.Text() == "none" {
		hint := "" // users of tc(8) may expect that m means mega
		if number, ok := strings.CutSuffix(a.Text(), "m"); ok {
			hint = fmt.Sprintf("; m means a thousandth: did you mean %sM?", number)
		}
		c.add(t, a.Place, limitRate, true, "%s: want 1k to 100G bits per second, such as 20M%s", cmp.Or(a.Text(), `""`), hint)
	}
	if hostNetwork {
		c.add(t, a.Place, limitHostNetwork, false, "the pod has hostNetwork: there is no interface to limit")
	}
}

// hostPorts reports two containers with the same port of the node, which the API server accepts.
func (c *checker) hostPorts(t part, spec strict.Value) {
	seen := map[string]int{}
	for _, list := range []string{"initContainers", "containers"} {
		for _, container := range spec.Get(list).Items() {
			for _, port := range container.Get("ports").Items() {
				id := c.hostPort(t, port)
				if line, twice := seen[id]; twice && id != "" && list == "containers" {
					c.add(t, port.Get("hostPort").Place, hostPortTaken, true, "port %s is taken in line %d already", id, line)
				}
				seen[id] = port.Get("hostPort").Line
			}
		}
	}
}

// hostPort returns the port of the node that a container port uses, or "".
func (c *checker) hostPort(t part, port strict.Value) string {
	value := port.Get("hostPort")
	host := value.Text()
	if host == "" || host == "0" {
		return ""
	}
	n, err := strconv.Atoi(host)
	if _, ok := value.Data.(json.Number); !ok || err != nil || n < 1 || n > 65535 {
		c.add(t, value.Place, hostPort, true, "%s: want a number, 1 to 65535", value)
	}
	id := host + "/" + cmp.Or(port.Get("protocol").Text(), "TCP")
	if ip := port.Get("hostIP").Text(); ip != "" {
		id += " of " + ip
	}
	return id
}
