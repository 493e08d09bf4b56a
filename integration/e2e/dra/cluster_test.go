// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
)

// auditPolicy logs the requests for slices and claims, and all of the kubelet and the daemon.
const auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived", "ResponseStarted"], "rules": [
	{"level": "Metadata", "resources": [{"group": "resource.k8s.io"}]},
	{"level": "Metadata", "users": ["system:node:node1", "` + account + `"]},
	{"level": "None"}]}`

// daemonImage is the image of the shipped DaemonSet.
const daemonImage = "registry.example.com/podlace/sriov-device-plugin:latest"

type cluster struct {
	dir     string
	cmd     *exec.Cmd
	input   io.Closer
	control net.Listener
	groups  []string // cgroups of the cluster's machines
	sysctls string   // the machine's previous sysctls
}

func startCluster(dir string) (*cluster, error) {
	audit := filepath.Join(dir, "audit.yaml")
	plugins, err := node.Plugins()
	if err := errors.Join(err, os.MkdirAll(filepath.Join(dir, "images"), 0o755), os.WriteFile(audit, []byte(auditPolicy), 0o600),
		node.WriteImage(filepath.Join(dir, "images", "busybox.tar")),
		node.WriteProgram(filepath.Join(dir, "images", "daemon.tar"), daemonImage, filepath.Join(plugins, "sriov-device-plugin"))); err != nil {
		return nil, err
	}
	c := &cluster{dir: dir, sysctls: sysctls()}
	c.cmd = c.command("run")
	c.cmd.Env = append(c.cmd.Env, "APISERVER=--audit-log-path="+auditLog(dir)+" --audit-policy-file="+audit+betaAPIs(),
		"KUBELETS="+kubeletFlags())
	c.cmd.Stderr = os.Stderr
	input, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.input = input
	begin := time.Now()
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if lines.Text() == "ready" {
			fmt.Printf("cluster: ready in %.1f s, load %s\n", time.Since(begin).Seconds(), load())
			return c, errors.Join(c.noteGroups(), c.serve())
		}
	}
	return nil, errors.Join(errors.New("the cluster is not ready"), c.cmd.Wait())
}

// betaAPIs enables additional API groups: TestRights needs v1beta2 of resource.k8s.io, and some feature gates in GATES need others.
func betaAPIs() string {
	flag := " --runtime-config=resource.k8s.io/v1beta2=true"
	switch {
	case hasGate("GenericWorkload"):
		flag += ",scheduling.k8s.io/v1beta1=true"
	case os.Getenv("VERSION") == "1.34" && hasGate("DRADeviceTaints"): // the scheduler waits for DeviceTaintRules
		flag += ",resource.k8s.io/v1alpha3=true"
	}
	return flag
}

// kubeletFlags are added to those of cluster.sh. The first sets how often the kubelet retries to prepare a claim.
func kubeletFlags() string {
	flags := "--sync-frequency=10s --pod-manifest-path=" + manifests
	if os.Getenv("VERSION") == "1.34" {
		flags += " --feature-gates=KubeletCrashLoopBackOffMax=true" // on by default since 1.35; cluster.sh sets the key
	}
	return flags
}

func auditLog(dir string) string { return filepath.Join(dir, "plane", "audit.log") }

// command returns an exec.Cmd for a subcommand of cluster.sh. The cluster has one node and no kube-proxy.
func (c *cluster) command(verb string, args ...string) *exec.Cmd {
	cmd := exec.Command(script(), append([]string{verb, c.dir}, args...)...)
	cmd.Env = append(os.Environ(), "NODES=node1", "PROXY=none", "FAMILIES=4")
	return cmd
}

// noteGroups stores the names of the cgroups of the cluster's simulated machines.
func (c *cluster) noteGroups() error {
	for _, m := range []string{"plane", "node1"} {
		pid, err := os.ReadFile(filepath.Join(c.dir, m, "pid"))
		if err != nil {
			return err
		}
		data, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/cgroup")
		if err != nil {
			return err
		}
		_, rest, found := strings.Cut(string(data), "podlace-node-")
		if !found {
			return fmt.Errorf("%s has no cgroup of its own: %s", m, data)
		}
		number, _, _ := strings.Cut(strings.ReplaceAll(rest, "/", "\n"), "\n")
		c.groups = append(c.groups, "podlace-node-"+number)
	}
	return nil
}

// stop ends the cluster. It returns an error if cgroups of it remain on the host, or if the host's sysctls have changed.
func (c *cluster) stop() error {
	if c.control != nil {
		_ = c.control.Close()
	}
	_ = c.input.Close()
	if err := c.cmd.Wait(); err != nil {
		return err
	}
	var left []string
	for _, g := range c.groups {
		for _, pattern := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
			found, _ := filepath.Glob(pattern + g)
			left = append(left, found...)
		}
	}
	if now := sysctls(); now != c.sysctls {
		left = append(left, fmt.Sprintf("the sysctls are %s and were %s", now, c.sysctls))
	}
	if len(left) > 0 {
		return fmt.Errorf("left on the machine: %s", strings.Join(left, "\n"))
	}
	return nil
}

// sysctls returns the sysctls that a kubelet sets and that have one value for the whole host, not one for each namespace.
func sysctls() (values string) {
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"} {
		data, _ := os.ReadFile("/proc/sys/" + name)
		values += name + "=" + strings.TrimSpace(string(data)) + " "
	}
	return values
}

func load() string {
	text, _ := os.ReadFile("/proc/loadavg")
	return strings.Join(strings.Fields(string(text))[:2], " ")
}

func controlSocket(dir string) string { return filepath.Join(dir, "control") }

// serve executes commands of the tests, which run in node1, on the simulated control plane machine.
func (c *cluster) serve() (err error) {
	c.control, err = net.Listen("unix", controlSocket(c.dir))
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := c.control.Accept()
			if err != nil {
				return
			}
			go c.answer(conn)
		}
	}()
	return nil
}

type outcome struct{ Output, Error string }

func (c *cluster) answer(conn net.Conn) {
	defer conn.Close()
	var args []string
	var answer outcome
	err := json.NewDecoder(conn).Decode(&args)
	if err == nil {
		var out []byte
		out, err = c.command("exec", append([]string{"plane"}, args...)...).CombinedOutput()
		answer.Output = string(out)
	}
	if err != nil {
		answer.Error = err.Error()
	}
	_ = json.NewEncoder(conn).Encode(answer)
}

// inPlane runs a command on the simulated control plane machine.
func inPlane(args ...string) (string, error) {
	conn, err := net.Dial("unix", controlSocket(os.Getenv(dirEnv)))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	var answer outcome
	if err := errors.Join(json.NewEncoder(conn).Encode(args), json.NewDecoder(conn).Decode(&answer)); err != nil {
		return "", err
	}
	if answer.Error != "" {
		return answer.Output, fmt.Errorf("%s: %s: %s", strings.Join(args, " "), answer.Error, answer.Output)
	}
	return answer.Output, nil
}
