// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/conf"
)

// onePod is the pod of the first example in docs/SRIOV.md.
const onePod = `apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations:
    kubernetes.io/ingress-bandwidth: 20M
    kubernetes.io/egress-bandwidth: 20M
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: web
    image: podlace.test/busybox:1
    command: [sh, -c, "mkdir /www; hostname > /www/index.html; httpd -f -p 8080 -h /www"]
    ports: [{containerPort: 8080, hostPort: 30080}]
    resources: {limits: {example.com/fast: 1}}
`

// TestOneConflist (V-18): the shipped conflist gives one pod an eth0, a hostPort, a bandwidth limit and a VF. The output of the
// administrator's commands equals docs/SRIOV.md.
func TestOneConflist(t *testing.T) {
	shipped, err := conf.Conflist(conflist)
	if err != nil {
		t.Fatal(err)
	}
	l := startVFLab(t, pools, string(shipped))
	if err := os.WriteFile(filepath.Join(manifests, "web.json"), []byte(onePod), 0o600); err != nil {
		t.Fatal(err)
	}
	l.awaitRunning("web", "")
	ids := l.allocatedVFs("web", "web", resource)
	if len(ids) != 1 {
		t.Fatalf("the pod was allocated %v", ids)
	}
	l.checkAttached("web", ids...)
	s, _ := sandboxOf("web")
	netns, podlace := filepath.Base(s.netns), filepath.Join(l.bin, "podlace")
	checkWithin(t, 10*time.Second, "the hostPort answers", func() error {
		return exec.Command("curl", "-sf", "http://192.0.2.1:30080/").Run()
	})
	var told strings.Builder
	run := func(shown, only string, command ...string) {
		t.Helper()
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v", command, err)
		}
		told.WriteString("$ " + shown + "\n")
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, only) {
				told.WriteString(strings.TrimRight(line, " \n") + "\n")
			}
		}
	}
	run("curl http://192.0.2.1:30080/", "", "ip", "netns", "exec", "outside", "curl", "-s", "http://192.0.2.1:30080/")
	run("ip -n "+netns+" -br addr", "", "ip", "-n", netns, "-br", "addr")
	run("tc qdisc show | grep tbf", "tbf", "tc", "qdisc", "show")
	run("podlace sriov ls | grep shop/web", "shop/web", podlace, "sriov", "ls", "--config-file", l.devicePlugin.config(), "--sysfs", l.sysfs)
	run("podlace ls", "", podlace, "ls")
	story := told.String()
	for text, times := range map[string]int{"\nweb-node\n": 1, "\neth0@": 1, "\nnet1@": 1, " rate 20Mbit ": 2, ids[0] + " ": 1,
		"  shop/web-node  ": 2} {
		if got := strings.Count(story, text); got != times {
			t.Errorf("%q appears %d times, want %d, in\n%s", text, got, times, story)
		}
	}
	readme, err := os.ReadFile("../../../docs/SRIOV.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), onePod) || !strings.Contains(withoutVaryingValues(string(readme)), withoutVaryingValues(story)) {
		l.checkDocumented(string(readme), story)
	}
	l.removePods("web")
	l.checkReturned()
}

// checkDocumented fails the test if the pod's current state differs from the state that docs/SRIOV.md shows.
func (l *vfLab) checkDocumented(readme, story string) {
	l.t.Helper()
	if strings.Contains(readme, "hostPort: 30080") {
		l.t.Errorf("docs/SRIOV.md does not show what this test ran: replace the pod and the output of the commands by\n%s\n%s", onePod, story)
	} else {
		l.t.Logf("docs/SRIOV.md shows nothing of\n%s\n%s", onePod, story)
	}
}

var (
	late   = regexp.MustCompile(` *fe80::[0-9a-f:]+/64`)
	random = regexp.MustCompile(`cni-[0-9a-f-]{36}|@if\d+|(veth|bwp)[0-9a-f]+|\b[0-9a-f]{13}\b|\b(10\.58\.\d+\.|fd00:58::)[0-9a-f]+`)
	gap    = regexp.MustCompile(` +`)
)

// withoutVaryingValues removes from a text the values that differ between runs, and the white space around them.
func withoutVaryingValues(text string) string {
	return gap.ReplaceAllString(random.ReplaceAllString(late.ReplaceAllString(text, ""), "?"), " ")
}
