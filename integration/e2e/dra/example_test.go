// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

// TestExample: with the configuration, template and pod of docs/DRA.md's quickstart, the pod has net1 and the claim has the settings that
// the document shows.
func TestExample(t *testing.T) {
	data, err := os.ReadFile("../../../docs/DRA.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := func(what, pattern string) string {
		found := regexp.MustCompile(pattern).FindStringSubmatch(string(data))
		if found == nil {
			t.Fatal("docs/DRA.md shows no ", what)
		}
		return found[1]
	}
	template := shown("template", "(?s)\n```yaml\n([^`]*kind: ResourceClaimTemplate\n[^`]*)\n```")
	settings := shown("settings", `(?m)^shop/web-vf-\w+ .* prepared +(.*)$`)
	l := newLab(t, setup{config: shown("configuration", "(?s)\n```json\n([^`]*)\n```")})
	classes, err := l.podlace("classes")
	if err != nil {
		t.Fatalf("%v: %s", err, classes)
	}
	l.create(classes)
	text := regexp.MustCompile(`(?m)^ +(image|command): .*\n`).ReplaceAllString(strings.ReplaceAll(template, "namespace: shop", "namespace: "+l.ns), "")
	for _, one := range strings.Split(text, "\n---\n")[1:] { // after the namespace
		l.create(one)
	}
	l.runs("web")
	claim := l.claimOf("web", "vf")
	ids := l.allocated(claim)
	l.attached("web", ids...)
	if mtu := l.inside("web")["net1"].MTU; mtu != 1450 {
		t.Errorf("net1 has MTU %d: want that of the claim", mtu)
	}
	within(t, "the status of the claim has net1", func() error {
		devices := l.getClaim(claim).Status.Devices
		if len(devices) != 1 || devices[0].NetworkData == nil || devices[0].NetworkData.InterfaceName != "net1" {
			return fmt.Errorf("%+v", devices)
		}
		return nil
	})
	s, _ := l.sandboxOf("web")
	addresses, err := exec.Command("nsenter", "--net="+s.netns, "ip", "-br", "addr").CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, addresses)
	}
	list, err := l.podlace("ls", "--sysfs", l.sysfs)
	if err != nil || !regexp.MustCompile(claim+` .* net1 .* prepared +`+settings+`\n`).MatchString(list+"\n") {
		t.Errorf("%v: %s", err, list)
	}
	status, _ := json.MarshalIndent(l.getClaim(claim).Status.Devices, "", "  ")
	fmt.Printf("$ ip -n %s -br addr\n%s\n$ podlace sriov ls\n%s\n$ kubectl get resourceclaim %s -o jsonpath={.status.devices}\n%s\n(image %s)\n",
		l.ns, addresses, list, claim, status, node.Image)
}
