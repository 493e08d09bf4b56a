// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

// nodeAPI starts an API server that streams two Nodes to every watch. The second one's address is the gateway of the route to its podCIDR.
func nodeAPI(t *testing.T) (kubeconfig string) {
	t.Helper()
	type object = map[string]any
	node := func(name, podCIDR, address string) object {
		return object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": name, "uid": name, "resourceVersion": "7"},
			"spec": object{"podCIDRs": []string{podCIDR}}, "status": object{"addresses": []object{{"type": "InternalIP", "address": address}}}}
	}
	end := object{"apiVersion": "v1", "kind": "Node", "metadata": object{"resourceVersion": "8",
		"annotations": object{"k8s.io/initial-events-end": "true"}}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for _, e := range []object{{"type": "ADDED", "object": node("n1", "10.244.1.0/24", "192.0.2.1")},
			{"type": "ADDED", "object": node("n2", "10.244.2.0/24", "192.0.2.2")}, {"type": "BOOKMARK", "object": end}} {
			_ = json.NewEncoder(w).Encode(e)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	kerneltest.Must(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"contexts": [{"name": "c", "context": {"cluster": "c"}}], "clusters": [{"name": "c", "cluster": {"server": %q}}]}`, server.URL), 0o600))
	return kubeconfig
}

// agentLab is a node on which podlace-node has never run.
type agentLab struct {
	*testing.T
	dir, kubeconfig string
}

const agentConflist = `{"cniVersion": "1.0.0", "name": "podlace", "plugins": [{"type": "podlace-bridge"}, {"type": "podlace-portmap"}]}`

// resetNode removes what the agent wrote, but keeps another network's configuration.
func (l agentLab) resetNode() {
	l.Helper()
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	defer host.Close()
	_, err = noderoutes.Remove(&host.NS)
	kerneltest.Must(l, err, os.RemoveAll("/run/podlace"), os.RemoveAll(l.dir+"/bin"), os.RemoveAll(l.dir+"/net.d"),
		os.MkdirAll(l.dir+"/net.d", 0o755), os.WriteFile(l.dir+"/net.d/05-other.conflist", []byte("{}"), 0o600))
}

// startAgent starts the agent with additional environment variables, and writes its output to out.
func (l agentLab) startAgent(out *bytes.Buffer, env ...string) *exec.Cmd {
	l.Helper()
	cmd := exec.Command(filepath.Join(harness.FaultDir(), "podlace-node"), "run", "--node-name", "n1", "--config", l.dir+"/config.json",
		"--kubeconfig", l.kubeconfig, "--plugins", l.dir+"/plugins", "--http", "")
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), out, out
	kerneltest.Must(l, cmd.Start())
	return cmd
}

func (l agentLab) hasRoute() bool {
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	defer host.Close()
	routes, err := host.ProtocolRoutes(noderoutes.Protocol)
	kerneltest.Must(l, err)
	return len(routes) == 2
}

// checkOrder checks that a file or route exists only if all that the agent creates before it exist too. No file may be incomplete.
func (l agentLab) checkOrder(when string) {
	l.Helper()
	whole := 0
	for from, to := range map[string]string{"bridge": "podlace-bridge", "portmap": "podlace-portmap", "loopback": "loopback"} {
		want, err := os.ReadFile(filepath.Join(l.dir, "plugins", from))
		kerneltest.Must(l, err)
		got, err := os.ReadFile(filepath.Join(l.dir, "bin", to))
		if err == nil && !bytes.Equal(got, want) {
			l.Errorf("%s: %s is incomplete", when, to)
		} else if err == nil {
			whole++
		}
	}
	node, err := os.ReadFile("/run/podlace/node.json")
	if err == nil && (!json.Valid(node) || !l.hasRoute()) {
		l.Errorf("%s: node.json (%s) exists before the routes", when, node)
	}
	conflist, confErr := os.ReadFile(filepath.Join(l.dir, "net.d/10-podlace.conflist"))
	if confErr == nil && (string(conflist) != agentConflist || whole != 3 || err != nil) {
		l.Errorf("%s: the conflist (%s) exists with %d of 3 plugins; node.json: %v", when, conflist, whole, err)
	}
	entries, err := os.ReadDir(l.dir + "/net.d")
	kerneltest.Must(l, err)
	readable := 0
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".conflist" || ext == ".conf" || ext == ".json" {
			readable++
		}
		if strings.HasPrefix(e.Name(), ".") && filepath.Ext(e.Name()) == ".conflist" {
			l.Errorf("%s: a runtime would read the temporary file %s", when, e.Name())
		}
	}
	if readable == 0 {
		l.Errorf("%s: the runtime has no configuration", when)
	}
}

// connectNode gives the node an address on a link to a pod, which goes with the pod's namespace.
func connectNode(t *testing.T, pod *sandbox.Pod) {
	t.Helper()
	host, err := kernel.Host()
	kerneltest.Must(t, err)
	defer host.Close()
	netns, err := os.Open(pod.Path)
	kerneltest.Must(t, err)
	defer netns.Close()
	_, err = host.AddVeth(kernel.Veth{Host: "agent0", Pod: "eth0", Netns: netns})
	kerneltest.Must(t, err)
	t.Cleanup(func() { _ = netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "agent0"}}) })
	link, err := netlink.LinkByName("agent0")
	kerneltest.Must(t, err)
	address, err := netlink.ParseAddr("192.0.2.1/24")
	kerneltest.Must(t, err, netlink.AddrAdd(link, address), netlink.LinkSetUp(link), pod.Do(func() error {
		other, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(other)
	}))
}

// TestAgentKilled kills podlace-node at each kernel or file change of its first start and at each point between two, and starts it again.
func TestAgentKilled(t *testing.T) {
	l := agentLab{t, t.TempDir(), nodeAPI(t)}
	pod := kerneltest.NewPod(t)
	kerneltest.Must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)) // the removal leaves it on
	kerneltest.Clean(t, pod)
	kerneltest.Must(t, os.Mkdir(l.dir+"/plugins", 0o755))
	for _, p := range []string{"bridge", "portmap", "loopback"} {
		kerneltest.Must(t, os.WriteFile(l.dir+"/plugins/"+p, bytes.Repeat([]byte(p), 300_000), 0o755))
	}
	kerneltest.Must(t, os.WriteFile(l.dir+"/10-podlace.conflist", []byte(agentConflist), 0o600),
		os.WriteFile(l.dir+"/config.json", fmt.Appendf(nil, `{"binDir": "%[1]s/bin", "confDir": "%[1]s/net.d", "takeOver": true}`, l.dir), 0o600))
	connectNode(t, pod)
	trace := filepath.Join(t.TempDir(), "moments")
	ready := func(env ...string) {
		t.Helper()
		var out bytes.Buffer
		cmd := l.startAgent(&out, env...)
		for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			status, _ := os.ReadFile("/run/podlace/node-status.json")
			if bytes.Contains(status, []byte(`"ready": true`)) {
				break
			} else if time.Now().After(until) {
				t.Fatalf("not ready within a minute: %s\n%s", status, out.String())
			}
		}
		l.checkOrder("when it is ready")
		kerneltest.Must(t, cmd.Process.Signal(os.Interrupt), cmd.Wait())
		l.checkOrder("after its end")
	}
	l.resetNode()
	ready("PODLACE_FAULT_MOMENTS=" + trace)
	moments, err := os.ReadFile(trace)
	kerneltest.Must(t, err)
	count := strings.Count(string(moments), "\n")
	if count < 18 {
		t.Fatalf("%d moments:\n%s", count, moments)
	}
	for n := 1; n <= count; n++ {
		l.resetNode()
		var out bytes.Buffer
		cmd := l.startAgent(&out, "PODLACE_RUN_AT="+strconv.Itoa(n)+" kill -KILL $PPID")
		timer := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		if !timer.Stop() {
			continue // this start had fewer moments than the traced one
		}
		l.checkOrder(fmt.Sprint("killed at moment ", n))
		_ = os.Remove("/run/podlace/node-status.json")
		ready()
	}
	t.Logf("figures: killed at %d moments", count)
	l.resetNode()
	kerneltest.Must(t, os.RemoveAll("/run/podlace"))
}
