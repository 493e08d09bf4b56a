// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/daemon/poolfile"
)

// chartImage is a placeholder for the image name. newChart uses the placeholder until the templates are complete.
const chartImage = "image.invalid/podlace:chart"

// imageAction is the template action that inserts the chart's value `image`.
const imageAction = `{{ required "image: the chart has no default image: --set image=REGISTRY/NAME@sha256:DIGEST" .Values.image | quote }}`

// shippedResources contains the resources of the shipped conflist of the plugin sriov.
const shippedResources = `["example.com/fast"]`

// resourcesAction inserts the resources of the chart's value `sriovConfig` into the conflist.
const resourcesAction = `{{ if .Values.sriovConfig }}{{ $names := list }}{{ range .Values.sriovConfig.resourceList }}` +
	`{{ $names = append $names (printf "%s/%s" (default "` + poolfile.DefaultPrefix + `" .resourcePrefix) .resourceName) }}{{ end }}` +
	`{{ $names | uniq | toJson }}{{ else }}` + shippedResources + `{{ end }}`

// chartFiles maps names to contents of the files in the Helm chart.
type chartFiles map[string]string

// newChart makes the chart from the folder conf: templates from the Kustomize base and components, with a value that switches each
// component, and a schema of the values that contains podlace-node's.
func newChart(conf, image, version, appVersion string) (chartFiles, error) {
	if _, err := parseImage(image); err != nil {
		return nil, err
	}
	components, err := componentNames(conf)
	if err != nil {
		return nil, err
	}
	files, err := objectTemplates(conf, components)
	if err != nil {
		return nil, err
	}
	files["templates/checks.yaml"] = componentChecks() + sriovChecks
	comments := map[string]string{}
	for _, c := range components {
		if comments[c], err = headComment(filepath.Join(conf, "components", c, "kustomization.yaml")); err != nil {
			return nil, err
		}
	}
	files["values.yaml"] = values(image, components, comments)
	if files["values.schema.json"], err = valuesSchema(conf, components, comments); err != nil {
		return nil, err
	}
	return files, files.addStatic(filepath.Join(conf, "chart"), version, appVersion)
}

// addStatic adds the files of a folder, and sets the versions in Chart.yaml.
func (c chartFiles) addStatic(folder, version, appVersion string) error {
	from := os.DirFS(folder)
	return fs.WalkDir(from, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(from, name)
		text := string(data)
		if name == "Chart.yaml" {
			text = strings.Replace(text, "\nversion: 0.0.0\n", "\nversion: "+version+"\n", 1)
			text = strings.Replace(text, "\nappVersion: unknown\n", fmt.Sprintf("\nappVersion: %q\n", appVersion), 1)
		}
		c[path.Clean(name)] = text
		return err
	})
}

// validChoices returns each set of compatible components.
func validChoices(components []string) (all [][]string) {
	for bits := range 1 << len(components) {
		var choice []string
		for i, c := range components {
			if bits>>i&1 == 1 {
				choice = append(choice, c)
			}
		}
		if checkComponents(components, choice) == nil {
			all = append(all, choice)
		}
	}
	return all
}

// objectTemplates renders the manifest for each valid set of components, and merges all texts of an object into one template.
func objectTemplates(conf string, components []string) (chartFiles, error) {
	all := validChoices(components)
	if len(all) > maxChoices {
		return nil, fmt.Errorf("%d choices of components: no more than %d fit", len(all), maxChoices)
	}
	config, err := configTemplate(conf, components)
	if err != nil {
		return nil, err
	}
	merged := map[string][]mergedLine{}
	for i, choice := range all {
		text, err := renderManifest(conf, chartImage, choice, nil)
		if err != nil {
			return nil, err
		}
		for _, object := range strings.Split(withoutHeader(string(text)), "\n---\n") {
			name, lines, err := objectTemplate(object, config)
			if err != nil {
				return nil, err
			}
			merged[name] = mergeLines(merged[name], lines, choiceSet{}.with(i))
		}
	}
	files := chartFiles{}
	for name, lines := range merged {
		text, err := objectTemplateText(lines, allLiterals(components, all), len(all))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		files["templates/"+name+".yaml"] = text
	}
	return files, nil
}

// withoutHeader removes the comments at the start of a manifest.
func withoutHeader(text string) string {
	for strings.HasPrefix(text, "#") {
		_, text, _ = strings.Cut(text, "\n")
	}
	return strings.TrimSuffix(text, "\n")
}

// objectTemplate returns an object's name and template, in which chart values replace what a user may change.
func objectTemplate(text string, config []string) (name string, lines []string, err error) {
	var object struct {
		Kind     string
		Metadata struct{ Name string }
	}
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		return "", nil, err
	}
	name = strings.ToLower(object.Kind) + "-" + object.Metadata.Name
	if strings.Contains(text, "{{") {
		return "", nil, fmt.Errorf("%s contains {{, which begins an action of a template", name)
	}
	text = strings.ReplaceAll(text, chartImage, imageAction)
	lines = splitUnits(text)
	switch name {
	case "namespace-podlace": // with --namespace podlace --create-namespace the namespace exists
		lines = wrap(`{{- if ne .Release.Namespace "podlace" }}`, lines, "{{- end }}")
	case "configmap-podlace-node":
		for i, l := range lines {
			lines[i] = strings.Replace(l, shippedResources, resourcesAction, 1)
		}
		lines = replaceText(lines, "config.json", func([]string) []string { return config })
		lines = replaceText(lines, "10-podlace.conflist", unlessSet("conflist", `.Values.conflist | trimSuffix "\n"`))
	case "configmap-sriov-device-plugin":
		lines = replaceText(lines, "config.json", unlessSet("sriovConfig", ".Values.sriovConfig | toPrettyJson"))
	case "deviceclass-fast.example.com": // the class of the example
		lines = wrap("{{- if not .Values.sriovConfig }}", lines, "{{- end }}")
	}
	return name, lines, nil
}

func wrap(before string, lines []string, after string) []string {
	return slices.Concat([]string{before}, lines, []string{after})
}

// replaceText replaces the text of a key in a ConfigMap's data by the result of by.
func replaceText(lines []string, key string, by func([]string) []string) []string {
	start := slices.Index(lines, "  "+key+": |") + 1
	end := start
	for end < len(lines) && strings.HasPrefix(lines[end], "    ") {
		end++
	}
	return slices.Concat(lines[:start], by(lines[start:end]), lines[end:])
}

// unlessSet makes a text a template that inserts it unless the user sets the chart value.
func unlessSet(value, text string) func([]string) []string {
	return func(shipped []string) []string {
		set := []string{"{{- if .Values." + value + " }}", "{{ " + text + " | indent 4 }}", "{{- else }}"}
		return slices.Concat(set, shipped, []string{"{{- end }}"})
	}
}

// configTemplate returns the template of podlace-node's configuration, which merges that of the base, the keys of components, and the
// chart's value `config`.
func configTemplate(conf string, components []string) ([]string, error) {
	base, err := compactJSON(filepath.Join(conf, "base", "config.json"))
	if err != nil {
		return nil, err
	}
	lines := []string{fmt.Sprintf("{{- $config := fromJson %q }}", base)}
	for _, c := range components {
		keys, err := compactJSON(filepath.Join(conf, "components", c, "config.json"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		set := fmt.Sprintf("{{ range $key, $value := fromJson %q }}{{ $_ := set $config $key $value }}{{ end }}", keys)
		lines = append(lines, fmt.Sprintf("{{- if .Values.%s }}%s{{ end }}", c, set))
	}
	return append(lines, "{{- range $key, $value := .Values.config }}{{ $_ := set $config $key $value }}{{ end }}",
		"{{ $config | toPrettyJson | indent 4 }}"), nil
}

func compactJSON(file string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	err = json.Compact(&b, data)
	return b.String(), err
}

// componentChecks returns a template that fails for incompatible components, like `make manifest`.
func componentChecks() string {
	var b strings.Builder
	for _, r := range rules() {
		for _, other := range r.without {
			fmt.Fprintf(&b, "{{- if and .Values.%s .Values.%s }}{{ fail %q }}{{ end }}\n", r.component, other, r.violation(other))
		}
		if len(r.oneOf) > 0 {
			fmt.Fprintf(&b, "{{- if and .Values.%s (not (or .Values.%s)) }}{{ fail %q }}{{ end }}\n", r.component,
				strings.Join(r.oneOf, " .Values."), r.violation(""))
		}
	}
	return b.String()
}
