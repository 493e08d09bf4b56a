// SPDX-License-Identifier: Apache-2.0

// Package dra_test runs pods with ResourceClaims for VFs on one node of a real Kubernetes cluster, which scripts/cluster.sh runs. The
// cluster consists of etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kubelet and containerd. The daemon sriov-device-plugin
// and the CNI plugins are built from this repository. The daemon has the rights of the shipped manifest and a token that is bound to its
// node. The VFs are veths. Files in sysfs emulate the cards: each of the two NUMA nodes has one PF, and each PF has four VFs.
//
// The test binary runs twice. The first process runs on the host: it starts the cluster, and runs the binary again in node1. The second
// process runs the tests.
//
//	KUBERNETES    folder of Kubernetes' programs and etcd
//	CONTAINERD    containerd of the node, 2.0 or newer
//	PODLACE_BIN   folder of the plugins (default ../../../bin)
//	VERSION       version of Kubernetes: 1.37 (default) or 1.34
//	GATES         feature gates of the control plane and the kubelet, such as DRADeviceTaints=false
//	KERNELTEST    "require" makes a missing prerequisite a failure, if KUBERNETES is set
package dra_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

const (
	dirEnv  = "PODLACE_TEST_CLUSTER" // folder of the cluster, when the program runs in node1
	skipEnv = "PODLACE_TEST_SKIP"    // the reason why there is no cluster
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	switch {
	case os.Getenv(dirEnv) != "":
		return inside(m)
	case flag.Lookup("test.list").Value.String() != "":
		return m.Run()
	}
	if err := needs(); err != nil {
		if os.Getenv("KERNELTEST") == "require" && os.Getenv("KUBERNETES") != "" {
			fmt.Println("FAIL: no cluster:", err)
			return 1
		}
		_ = os.Setenv(skipEnv, err.Error())
		return m.Run()
	}
	code, err := outside()
	if err != nil {
		fmt.Println("FAIL:", err)
		return max(code, 1)
	}
	return code
}

// needs returns an error for a missing precondition.
func needs() error {
	for _, name := range []string{"KUBERNETES", "CONTAINERD"} {
		if os.Getenv(name) == "" {
			return errors.New(name + " is not set; make dra builds what is needed and sets it")
		}
	}
	plugins, err := node.Plugins()
	if err != nil {
		return err
	}
	for _, path := range []string{filepath.Join(plugins, "sriov-device-plugin"), filepath.Join(plugins, "sriov"),
		filepath.Join(plugins, "podlace"), filepath.Join(os.Getenv("KUBERNETES"), "kube-scheduler"), os.Getenv("CONTAINERD")} {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("missing: %w", err)
		}
	}
	if out, err := exec.Command(script(), "check").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func script() string {
	path, err := filepath.Abs("../../../scripts/cluster.sh")
	if err != nil {
		panic(err)
	}
	return path
}

// outside starts the cluster, runs this program again in node1, and reports what remains of the cluster on the host.
func outside() (code int, err error) {
	dir, err := os.MkdirTemp("", "podlace-dra-")
	if err != nil {
		return 1, err
	}
	c, err := startCluster(dir)
	if err != nil {
		return 1, fmt.Errorf("start of the cluster, whose logs are in %s: %w", dir, err)
	}
	code = c.runTests()
	if err := c.stop(); err != nil {
		return 1, fmt.Errorf("end of the cluster, whose logs are in %s: %w", dir, err)
	}
	if code != 0 {
		fmt.Println("the logs of the cluster are in", dir)
		return code, nil
	}
	return 0, os.RemoveAll(dir)
}

// runTests runs this program again in node1 and returns its exit code.
func (c *cluster) runTests() int {
	self, err := os.Executable()
	if err != nil {
		fmt.Println("FAIL:", err)
		return 1
	}
	cmd := c.command("exec", append([]string{"node1", self}, os.Args[1:]...)...)
	cmd.Env = append(cmd.Env, dirEnv+"="+c.dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	fmt.Println("FAIL: tests in node1:", err)
	return 1
}

// inside sets up the node's network and the daemon's rights, and runs the tests.
func inside(m *testing.M) int {
	for _, step := range []func() error{ownSys, installPlugins, becomeReady, grantRights} {
		if err := step(); err != nil {
			fmt.Println("FAIL: the node's first steps:", err)
			return 1
		}
	}
	return m.Run()
}

// installPlugins installs the CNI plugins and the shipped conflist as the node's network.
func installPlugins() error {
	from, err := node.Plugins()
	if err != nil {
		return err
	}
	programs, err := filepath.Glob(filepath.Join(from, "[a-z]*"))
	if err := errors.Join(err, os.MkdirAll("/opt/cni/bin", 0o755), os.MkdirAll(filepath.Dir(conflist), 0o755),
		os.MkdirAll(manifests, 0o755)); err != nil {
		return err
	}
	for _, p := range programs {
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join("/opt/cni/bin", filepath.Base(p)), data, 0o755); err != nil {
			return err
		}
	}
	// Without kube-proxy, this rule stands for the API server's Service for pods in the node's network namespace.
	out, err := exec.Command("iptables", "-w", "-t", "nat", "-A", "OUTPUT", "-d", "10.96.0.1", "-p", "tcp", "--dport", "443",
		"-j", "DNAT", "--to", "192.0.2.10:6443").CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables: %w: %s", err, out)
	}
	return writeConflist(shippedConflist())
}
