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

// onePod is the pod of the quickstart in docs/SRIOV.md, with a hostPort and a limit of bandwidth.
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

// TestOneConflist (V-18): the shipped conflist gives one pod eth0, a hostPort, a limit and a VF. docs/SRIOV.md shows the pod's interfaces
// and the line of its VF.
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
	readme, err := os.ReadFile("../../../docs/SRIOV.md")
	if err != nil {
		t.Fatal(err)
	}
	// run returns the lines of a command's output that contain a text.
	run := func(only string, command ...string) (lines string) {
		t.Helper()
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v", command, err)
		}
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, only) {
				lines += strings.TrimRight(line, " \n") + "\n"
			}
		}
		return lines
	}
	shown := func(output string) {
		t.Helper()
		// The kubelet adds the name of the node to that of a static pod.
		output = strings.ReplaceAll(output, "web-node", "web")
		if !strings.Contains(withoutVaryingValues(string(readme)), withoutVaryingValues(output)) {
			t.Errorf("docs/SRIOV.md does not show what this test ran: replace the output by\n%s", output)
		}
	}
	if got := run("", "ip", "netns", "exec", "outside", "curl", "-s", "http://192.0.2.1:30080/"); got != "web-node\n" {
		t.Errorf("the hostPort answers %q", got)
	}
	if got := run("tbf", "tc", "qdisc", "show"); strings.Count(got, " rate 20Mbit ") != 2 {
		t.Errorf("want two limits of 20 Mbit/s:\n%s", got)
	}
	if got := run("shop/web-node", podlace, "ls"); strings.Count(got, "\n") != 1 {
		t.Errorf("podlace ls prints\n%s", got)
	}
	shown(run("", "ip", "-n", netns, "-br", "addr"))
	shown(run("shop/web", podlace, "sriov", "ls", "--config-file", l.devicePlugin.config(), "--sysfs", l.sysfs))
	l.removePods("web")
	l.checkReturned()
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
