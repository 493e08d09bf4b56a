// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/strict"
)

// The method manifests() reads a file of YAML documents and checks those objects that Podlace uses.
func (c *checker) manifests(t part) {
	decoder := yaml.NewDecoder(bytes.NewReader(t.data))
	known := 0
	c.claims = false
	for {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			c.add(t, strict.Place{Line: yamlLine(err)}, syntax, true, "%v", err)
			return
		}
		if len(document.Content) > 0 {
			known += c.object(t, document.Content[0])
		}
	}
	switch {
	case c.claims:
		c.add(t, strict.Place{}, unknownFile, false, "'podlace validate' does not check claims, claim templates and device classes: "+
			"use 'podlace sriov check-claim'")
	case known == 0:
		c.add(t, strict.Place{}, unknownFile, false, "there is nothing here that Podlace reads: no network, no pod, no configuration of sriov-device-plugin")
	}
}

// yamlLine returns the line number in an error of the YAML decoder.
func yamlLine(err error) int {
	_, rest, _ := strings.Cut(err.Error(), "line ")
	digits, _, _ := strings.Cut(rest, ":")
	line, _ := strconv.Atoi(digits)
	return line
}

// The function at() follows a path of keys from a node and returns the value. at() returns nil if a key of the path is missing.
func at(n *yaml.Node, path ...string) *yaml.Node {
	n = withoutAlias(n)
	for _, key := range path {
		if n == nil || n.Kind != yaml.MappingNode {
			return nil
		}
		var value *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				value = n.Content[i+1]
			}
		}
		n = withoutAlias(value)
	}
	return n
}

// withoutAlias returns the node to which a YAML alias such as *name refers. An alias never refers to another alias.
func withoutAlias(n *yaml.Node) *yaml.Node {
	if n != nil && n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// valueOf returns the scalar at a path below a node. valueOf returns "" if the scalar is missing.
func valueOf(n *yaml.Node, path ...string) string {
	if v := at(n, path...); v != nil {
		return v.Value
	}
	return ""
}

// placeOf returns the line and column of a node, or no position for a nil node.
func placeOf(n *yaml.Node, key string) strict.Place {
	if n == nil {
		return strict.Place{Key: key}
	}
	return strict.Place{Line: n.Line, Column: n.Column, Key: key}
}

// PodTemplates contains each kind of object with a pod template, and the path to this pod template.
func PodTemplates() map[string][]string {
	template := []string{"spec", "template"}
	return map[string][]string{"Pod": {}, "Deployment": template, "DaemonSet": template, "StatefulSet": template, "ReplicaSet": template,
		"ReplicationController": template, "Job": template, "CronJob": {"spec", "jobTemplate", "spec", "template"}}
}

// The method object() checks a Kubernetes object and returns how many parts of the object Podlace uses.
func (c *checker) object(t part, o *yaml.Node) (known int) {
	kind := valueOf(o, "kind")
	if list := at(o, "items"); list != nil && strings.HasSuffix(kind, "List") {
		for _, item := range items(list) {
			known += c.object(t, item)
		}
		return known
	}
	t.key = strings.TrimSpace(kind + " " + valueOf(o, "metadata", "name"))
	if path, ok := PodTemplates()[kind]; ok {
		c.pod(t, o, at(o, path...))
		return 1
	}
	switch kind {
	case "NetworkAttachmentDefinition":
		if config := at(o, "spec", "config"); config != nil {
			t.multus = true
			c.json(t.inside(config, "spec.config"))
		}
		return 1
	case "ConfigMap":
		return c.configMap(t, o)
	case "ResourceClaim", "ResourceClaimTemplate", "DeviceClass":
		c.claims = true
	}
	return 0
}

// configMap checks those values of a ConfigMap that are JSON configurations.
func (c *checker) configMap(t part, o *yaml.Node) (known int) {
	data := at(o, "data")
	if data == nil {
		return 0
	}
	for i := 0; i+1 < len(data.Content); i += 2 {
		name, value := data.Content[i].Value, withoutAlias(data.Content[i+1])
		if strings.HasSuffix(name, ".conflist") || strings.Contains(value.Value, `"resourceList"`) {
			c.json(t.inside(value, "data."+name))
			known++
		}
	}
	return known
}

// The method inside() returns a part with the text of a YAML value. The text of a block scalar starts on the line after its key.
func (t part) inside(value *yaml.Node, key string) part {
	line := value.Line - 1
	if value.Style == yaml.LiteralStyle || value.Style == yaml.FoldedStyle {
		line = value.Line
	}
	return part{file: t.file, line: t.line + line, total: t.total, key: t.key + ": " + key, multus: t.multus, data: []byte(value.Value),
		source: t.source}
}

// The method pod() checks the parts of a pod that the plugins get: bandwidth limits and hostPorts.
func (c *checker) pod(t part, object, pod *yaml.Node) {
	annotations := at(pod, "metadata", "annotations")
	for i := 0; annotations != nil && i+1 < len(annotations.Content); i += 2 {
		c.annotation(t, annotations.Content[i], withoutAlias(annotations.Content[i+1]))
	}
	spec := at(pod, "spec")
	if spec == nil {
		c.add(t, placeOf(object, "spec"), noSpec, true, "spec is missing")
		return
	}
	c.hostPorts(t, spec)
	if annotations != nil && valueOf(spec, "hostNetwork") == "true" {
		for i := 0; i+1 < len(annotations.Content); i += 2 {
			if key := annotations.Content[i]; slices.Contains(limitKeys(), key.Value) {
				c.add(t, placeOf(key, "metadata.annotations."+key.Value), limitHostNetwork, false, "the pod has hostNetwork: there is no interface to limit")
			}
		}
	}
}

// limitKeys contains the annotations that define the bandwidth limits of a pod.
func limitKeys() []string {
	return []string{"kubernetes.io/ingress-bandwidth", "kubernetes.io/egress-bandwidth"}
}

func (c *checker) annotation(t part, key, value *yaml.Node) {
	place := "metadata.annotations." + key.Value
	if !slices.Contains(limitKeys(), key.Value) {
		prefix, _, _ := strings.Cut(key.Value, "/")
		if near := strict.Nearest(key.Value, limitKeys()); near != "" && prefix != "k8s.v1.cni.cncf.io" {
			c.add(t, placeOf(key, place), unknownAnnotation, false, "no program reads this annotation; did you mean %s?", near)
		}
		return
	}
	if value.Tag != "!!str" {
		c.add(t, placeOf(value, place), wrongType, true, "%s is no string: the API server refuses the pod; write \"%[1]s\"", value.Value)
	}
	if _, err := bandwidth.ParseRate(value.Value); err != nil || value.Value == "none" {
		c.add(t, placeOf(value, place), limitRate, true, "%s: want 1k to 100G bits per second, such as 20M%s", value.Value, unitHint(value.Value))
	}
}

// unitHint returns a hint about the suffix m, because users of tc(8) may expect that m means mega.
func unitHint(rate string) string {
	if strings.HasSuffix(rate, "m") {
		return fmt.Sprintf("; m means a thousandth: did you mean %sM?", strings.TrimSuffix(rate, "m"))
	}
	return ""
}

// hostPorts reports an error if two containers use the same port of the node. The API server does not report this conflict.
func (c *checker) hostPorts(t part, spec *yaml.Node) {
	seen := map[string]int{}
	for _, list := range []string{"initContainers", "containers"} {
		for i, container := range items(at(spec, list)) {
			for j, port := range items(at(container, "ports")) {
				key := fmt.Sprintf("spec.%s[%d].ports[%d].hostPort", list, i, j)
				id := c.hostPort(t, port, key)
				if line, twice := seen[id]; twice && id != "" && list == "containers" {
					c.add(t, placeOf(at(port, "hostPort"), key), hostPortTaken, true, "port %s is taken in line %d already", id, line)
				}
				seen[id] = placeOf(at(port, "hostPort"), key).Line
			}
		}
	}
}

func items(list *yaml.Node) []*yaml.Node {
	if list == nil || list.Kind != yaml.SequenceNode {
		return nil
	}
	return list.Content
}

// hostPort returns the port of the node that a container port uses. hostPort returns "" if the container port has no hostPort.
func (c *checker) hostPort(t part, port *yaml.Node, key string) string {
	host := valueOf(port, "hostPort")
	if host == "" || host == "0" {
		return ""
	}
	if n, err := strconv.Atoi(host); err != nil || n < 1 || n > 65535 {
		c.add(t, placeOf(at(port, "hostPort"), key), hostPort, true, "%s: want 1 to 65535", host)
	}
	id := host + "/" + cmp.Or(valueOf(port, "protocol"), "TCP")
	if ip := valueOf(port, "hostIP"); ip != "" {
		id += " of " + ip
	}
	return id
}
