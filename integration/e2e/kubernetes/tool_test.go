// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestTool runs what an administrator has in the image: podlace in an agent's pod, the probes of the agents, and the Job of check.yaml.
func TestTool(t *testing.T) {
	c := startCluster(t, "4 6")
	c.setUpNetwork(t)
	c.startPods(t)
	t.Run("doctor", c.testDoctor)
	t.Run("check", c.testCheck)
	t.Run("silent peer", c.testSilentPeer)
	t.Run("doctor with the component debug", c.testDebug)
	t.Run("kubectl debug", c.testKubectlDebug)
}

// agentOf returns the pod of podlace-node on a node.
func (c *testCluster) agentOf(t *testing.T, node string) string {
	t.Helper()
	return strings.TrimSpace(c.kubectl(t, "-n", "podlace", "get", "pods", "-l", "app.kubernetes.io/name=podlace-node", "-o", "name",
		"--field-selector", "spec.nodeName="+node))
}

func (c *testCluster) inAgent(t *testing.T, node string, command ...string) string {
	t.Helper()
	out, err := c.try("exec", "", append([]string{"plane", "kubectl", "-n", "podlace", "exec", c.agentOf(t, node), "--"}, command...)...)
	if err != nil {
		t.Logf("%s: %v", node, err) // with a problem, the exit status is 1
	}
	return out
}

// testDoctor: in the agent's pod, doctor finds no false error, and says what it cannot see.
func (c *testCluster) testDoctor(t *testing.T) {
	out := c.inAgent(t, "node1", "/podlace", "doctor")
	t.Logf("podlace doctor in the agent's pod:\n%s", out)
	if !strings.HasPrefix(out, "not checked: kernel-features, runtime, status, pods, ") || !strings.Contains(out, "\nerrors: 0, warnings: 0, ok: ") {
		t.Error("unexpected findings")
	}
	for _, command := range []string{"ls", "limits", "topology"} {
		if got, node := c.inAgent(t, "node1", "/podlace", command), c.onNode(t, command); got != node {
			t.Errorf("podlace %s:\n%s", command, cmp.Diff(node, got))
		}
	}
}

// onNode runs podlace on node1 itself.
func (c *testCluster) onNode(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.try("exec", "", append([]string{"node1", filepath.Join(os.Getenv("PODLACE_BIN"), "podlace")}, args...)...)
	if err != nil {
		t.Logf("node1: %v", err)
	}
	return out
}

// testDebug: with the component, doctor finds in the agent's pod what it finds on the node, also in files that only the node has.
func (c *testCluster) testDebug(t *testing.T) {
	component, err := os.ReadFile("../../../conf/cluster/components/debug/kustomization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, patch, _ := strings.Cut(string(component), "- patch: |\n")
	c.kubectl(t, "-n", "podlace", "patch", "daemonset", "podlace-node", "--patch", strings.ReplaceAll("\n"+patch, "\n      ", "\n"))
	c.kubectl(t, "-n", "podlace", "rollout", "status", "daemonset", "podlace-node", "--timeout=120s")
	c.runScript(t, "exec", "node1", "sh", "-c", "mkdir -p /etc/ufw; echo ENABLED=yes >/etc/ufw/ufw.conf")
	node := c.onNode(t, "doctor", "--all")
	got := c.inAgent(t, "node1", "/podlace", "doctor", "--all")
	t.Logf("podlace doctor --all on the node:\n%s", node)
	if got != node {
		t.Errorf("in the agent's pod it differs:\n%s", cmp.Diff(strings.Split(node, "\n"), strings.Split(got, "\n")))
	} else {
		t.Log("in the agent's pod: the same")
	}
	if !strings.Contains(got, "warning forward-policy: ufw may drop the packets of pods on cni0") {
		t.Error("ufw is not found")
	}
}

var imageLine = regexp.MustCompile(`(?m)^ +image: (\S+)$`)

// image returns the image of the manifest.
func image(t *testing.T) string {
	t.Helper()
	manifest, err := os.ReadFile(os.Getenv("MANIFEST"))
	found := imageLine.FindSubmatch(manifest)
	if err != nil || found == nil {
		t.Fatalf("%v: no image in %s", err, os.Getenv("MANIFEST"))
	}
	return string(found[1])
}

// testKubectlDebug: the command of docs/CLUSTER.md finds the same as podlace on the node.
func (c *testCluster) testKubectlDebug(t *testing.T) {
	c.kubectl(t, "-n", namespace, "debug", "node/node1", "--image="+image(t), "--profile=sysadmin", "--env=PODLACE_MOUNTS=/proc/1/ns/mnt",
		"--image-pull-policy=IfNotPresent", "--attach=false", "--", "/podlace", "doctor", "--all")
	pod := strings.TrimSpace(c.kubectl(t, "-n", namespace, "get", "pods", "-l", "app.kubernetes.io/managed-by=kubectl-debug", "-o", "name"))
	c.kubectl(t, "-n", namespace, "wait", "--for=jsonpath={.status.phase}=Succeeded", pod, "--timeout=60s")
	if got, node := c.kubectl(t, "-n", namespace, "logs", pod), c.onNode(t, "doctor", "--all"); got != node {
		t.Errorf("it differs:\n%s", cmp.Diff(strings.Split(node, "\n"), strings.Split(got, "\n")))
	}
}

// outsideOf returns the machine that is no node.
func (c *testCluster) outsideOf(t *testing.T) *sandbox.Pod {
	t.Helper()
	root, err := os.ReadFile(filepath.Join(c.dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	return &sandbox.Pod{Name: "outside", Path: "/proc/" + strings.TrimSpace(string(root)) + "/root/run/netns/outside"}
}

// testCheck runs the commands of docs/CLUSTER.md, which leave nothing.
func (c *testCluster) testCheck(t *testing.T) {
	dns := os.Getenv("DNS")
	if dns == "" {
		t.Skip("SKIP, no DNS: the variable DNS is not set; make cluster ARGS=-test builds its program")
	}
	names := exec.Command(c.script, "exec", c.dir, "plane", dns, "-kubeconfig", filepath.Join(c.dir, "plane/admin.kubeconfig"), "-listen",
		"192.0.2.10:53,[2001:db8::10]:53")
	names.Env = c.env
	var outside net.Listener
	err := names.Start()
	if err == nil {
		t.Cleanup(func() { _ = names.Process.Kill(); _ = names.Wait() })
		err = c.outsideOf(t).Do(func() (err error) { outside, err = net.Listen("tcp", ":443"); return err })
	}
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	steps := strings.SplitAfter(documentedBlocks(t, "docs/CLUSTER.md", "Testing the connections", "bash", 1)[0], "\n")
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	c.runLines(t, "plane", "cd "+root+"\n"+strings.NewReplacer("registry.example.com/podlace:v1", image(t), " | kubectl",
		" | sed 's|1.1.1.1|192.0.2.100|; s|2606:4700:4700::1111|2001:db8::100|' | kubectl").Replace(steps[0]))
	table := c.runLines(t, "plane", steps[1])
	_, table, _ = strings.Cut(table, " TO ")
	want := `IPv4 IPv6
		a pod of the same node ok 1 ok 1
		pods of other nodes ok 2 ok 2
		a Service ok 1 ok 1
		a hostPort of the same node ok 1 ok 1
		hostPorts of other nodes ok 2 ok 2
		a name of the cluster's DNS ok 1 ok 1
		outside ok 1 ok 1`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(table)); diff != "" {
		t.Error(diff)
	}
	c.runLines(t, "plane", steps[2])
	if left := c.kubectl(t, "get", "all,sa,roles,rolebindings", "-A", "-o", "name"); strings.Contains(left, "podlace-check") {
		t.Errorf("left: %s", left)
	}
	for _, n := range c.machineNames()[1:] {
		if out, err := c.try("exec", "", n, "sh", "-c", "! nft list ruleset | grep 8479; ! grep -r podlace-check /run/podlace"); err != nil {
			t.Errorf("%s: %v: %s", n, err, out)
		}
	}
}

// testSilentPeer: the agent of node1 says that node2 answers, and that it does not while a firewall drops the packets.
func (c *testCluster) testSilentPeer(t *testing.T) {
	cidr := ""
	var node struct {
		Spec struct{ PodCIDRs []netip.Prefix }
	}
	c.getObjects(t, &node, "node", "node2")
	for _, p := range node.Spec.PodCIDRs {
		if p.Addr().Is4() {
			cidr = p.String()
		}
	}
	await := func(state string) {
		t.Helper()
		row := regexp.MustCompile(`(?m)^node2 +` + regexp.QuoteMeta(cidr) + ` .* ` + state + ` .*$`)
		for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
			out := c.inAgent(t, "node1", "/podlace-node", "status", "--all")
			if found := row.FindString(out); found != "" {
				t.Log(found)
				return
			} else if time.Now().After(end) {
				t.Fatalf("not %s:\n%s", state, out)
			}
		}
	}
	await("direct +yes")
	c.runScript(t, "exec", "node2", "nft", "table inet lost { chain i { type filter hook input priority 0; ip daddr "+cidr+" udp dport 33434 drop; }; }")
	await("silent +no")
	c.runScript(t, "exec", "node2", "nft", "delete table inet lost")
	await("direct +yes")
}
