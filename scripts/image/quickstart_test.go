// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/pkg/daemon/claimcheck"
)

// page is the quickstart of a document: its code blocks by language, and its commands with the output that it shows.
type page struct {
	name     string
	blocks   map[string][]string
	commands []shownCommand
}

type shownCommand struct{ line, output string }

// readQuickstart reads the section "Quickstart" of a document in docs/.
func readQuickstart(t *testing.T, name string) page {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(data), "\n## Quickstart\n")
	if !found {
		t.Fatalf("docs/%s has no heading \"## Quickstart\"", name)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	p := page{name: name, blocks: map[string][]string{}}
	for _, m := range regexp.MustCompile("(?s)\n```([a-z]+)\n(.*?\n)```").FindAllStringSubmatch(section, -1) {
		p.blocks[m[1]] = append(p.blocks[m[1]], m[2])
		if m[1] != "text" {
			continue
		}
		for line := range strings.Lines(m[2]) {
			command, prompt := strings.CutPrefix(line, "$ ")
			switch {
			case prompt || strings.HasPrefix(line, "make ") || strings.HasPrefix(line, "kubectl "):
				p.commands = append(p.commands, shownCommand{line: strings.TrimSpace(command)})
			case len(p.commands) > 0:
				p.commands[len(p.commands)-1].output += line
			}
		}
	}
	return p
}

// TestQuickstarts runs both quickstarts of SR-IOV, by resource name and by claim, which have the same six commands. An API server accepts
// the manifest, and the output is as shown. Commands of kubectl are compared with the manifest. TestExample of integration/e2e/dra and
// TestOneConflist of integration/e2e/kubelet run the pods.
func TestQuickstarts(t *testing.T) {
	for name, check := range map[string]string{"SRIOV.md": "kubectl", "DRA.md": "go"} {
		t.Run(name, func(t *testing.T) {
			p := readQuickstart(t, name)
			var forms []string
			for _, c := range p.commands {
				forms = append(forms, strings.Join(strings.Fields(c.line)[:2], " "))
			}
			want := []string{"make image", "make manifest", "kubectl apply", map[string]string{"kubectl": "kubectl -n", "go": "go run"}[check],
				"kubectl apply", "kubectl -n"}
			if diff := cmp.Diff(want, forms); diff != "" {
				t.Fatalf("docs/%s has other commands than the other quickstart (-want +got)\n%s", name, diff)
			}
			dir := t.TempDir()
			pod := slices.IndexFunc(p.blocks["yaml"], func(text string) bool { return strings.Contains(text, "kind: Pod\n") })
			if len(p.blocks["json"]) != 1 || pod < 0 {
				t.Fatalf("docs/%s: want one configuration and a pod", name)
			}
			for file, text := range map[string]string{"config.json": p.blocks["json"][0], "pod.yaml": p.blocks["yaml"][pod]} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			objects := runMakeManifest(t, p.commands[1].line, dir)
			p.compareManifest(t, objects)
			p.checkPod(t, p.blocks["yaml"][pod], objects)
			checkKubectl(t, p.commands, objects)
			p.checkOutput(t, dir)
		})
	}
}

// runMakeManifest runs the document's command and reads its manifest strictly.
func runMakeManifest(t *testing.T, line, dir string) objectsByName {
	t.Helper()
	line = regexp.MustCompile(`config\.json|podlace\.yaml`).ReplaceAllString(line, dir+"/$0")
	run := exec.Command("sh", "-eu", "-c", line)
	run.Dir, run.Env = root, append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=") // below another make it would name its folder in the output
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	text, err := os.ReadFile(filepath.Join(dir, "podlace.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return decodeObjects(t, bytes.TrimSuffix(text, []byte("\n")))
}

// compareManifest checks that the manifest has the document's configuration, resources and DeviceClass, and the pushed image.
func (p page) compareManifest(t *testing.T, objects objectsByName) {
	t.Helper()
	if got := objects["ConfigMap sriov-device-plugin"].(*core.ConfigMap).Data["config.json"]; got != p.blocks["json"][0] {
		t.Errorf("docs/%s: the manifest has another configuration:\n%s", p.name, got)
	}
	entry := sriovEntry(t, objects["ConfigMap podlace-node"].(*core.ConfigMap).Data["10-podlace.conflist"])
	if string(entry["resources"]) != `["example.com/fast"]` {
		t.Errorf("docs/%s: the conflist has the resources %s", p.name, entry["resources"])
	}
	_, image, _ := strings.Cut(p.commands[0].line, "PUSH=")
	if got := objects.device(t).Spec.Template.Spec.Containers[0].Image; got != image {
		t.Errorf("docs/%s: 'make image' pushes %s, and the manifest has %s", p.name, image, got)
	}
	shown := slices.DeleteFunc(slices.Clone(p.blocks["yaml"]), func(text string) bool { return !strings.Contains(text, "kind: DeviceClass\n") })
	class, ok := objects["DeviceClass fast.example.com"].(*resource.DeviceClass)
	if ok != (len(shown) == 1) {
		t.Fatalf("docs/%s shows %d DeviceClasses, and the manifest has %v", p.name, len(shown), class)
	}
	if ok {
		var documented resource.DeviceClass
		decodeStrict(t, []byte(shown[0]), &documented)
		if diff := cmp.Diff(&documented, class); diff != "" {
			t.Errorf("docs/%s: 'podlace sriov classes' prints another DeviceClass (-document +program)\n%s", p.name, diff)
		}
	}
}

// checkPod decodes pod.yaml strictly. It begins with the namespace of the pod, which must ask for the resource of the configuration.
func (p page) checkPod(t *testing.T, text string, objects objectsByName) {
	t.Helper()
	var namespace core.Namespace
	first, text, _ := strings.Cut(text, "\n---\n")
	decodeStrict(t, []byte(first), &namespace)
	for one := range strings.SplitSeq(text, "\n---\n") {
		if strings.Contains(one, "kind: ResourceClaimTemplate\n") {
			var template resource.ResourceClaimTemplate
			decodeStrict(t, []byte(one), &template)
			if class := template.Spec.Spec.Devices.Requests[0].Exactly.DeviceClassName; objects["DeviceClass "+class] == nil {
				t.Errorf("docs/%s: the manifest has no DeviceClass %s", p.name, class)
			}
			continue
		}
		var pod core.Pod
		decodeStrict(t, []byte(one), &pod)
		_, limited := pod.Spec.Containers[0].Resources.Limits["example.com/fast"]
		if !limited && len(pod.Spec.ResourceClaims) == 0 || pod.Namespace != namespace.Name {
			t.Errorf("docs/%s: the pod asks for no VF, or its namespace %s is not in pod.yaml", p.name, pod.Namespace)
		}
	}
}

// checkKubectl checks that commands of kubectl name files and objects of the quickstart.
func checkKubectl(t *testing.T, commands []shownCommand, objects objectsByName) {
	t.Helper()
	for _, c := range commands {
		for _, m := range regexp.MustCompile(`-f (\S+)`).FindAllStringSubmatch(c.line, -1) {
			if m[1] != "podlace.yaml" && m[1] != "pod.yaml" {
				t.Errorf("%s: the quickstart makes no %s", c.line, m[1])
			}
		}
		for _, m := range regexp.MustCompile(`-n (\S+) .* ?ds/(\S+)`).FindAllStringSubmatch(c.line, -1) {
			if set := objects["DaemonSet "+m[2]]; set == nil || set.GetNamespace() != m[1] {
				t.Errorf("%s: the manifest has no DaemonSet %s in the namespace %s", c.line, m[2], m[1])
			}
		}
	}
}

// checkOutput runs check-claim and compares its output with the document. TestExplainedVFs of integration/docs does so for explain.
func (p page) checkOutput(t *testing.T, dir string) {
	t.Helper()
	command := p.commands[3]
	args, found := strings.CutPrefix(command.line, "go run ./plugins/sriov-device-plugin ")
	if !found {
		return
	}
	t.Chdir(dir)
	var stdout, stderr bytes.Buffer
	status, _ := claimcheck.Run(strings.Fields(args), nil, &stdout, &stderr)
	if diff := cmp.Diff(command.output, stdout.String()+stderr.String()); diff != "" || status != 0 {
		t.Errorf("docs/%s: %s: status %d (-document +program)\n%s", p.name, command.line, status, diff)
	}
}
