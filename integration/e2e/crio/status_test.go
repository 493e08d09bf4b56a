// SPDX-License-Identifier: Apache-2.0

package crio_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/e2e/containerd/cri"
)

// TestStatus: while STATUS fails, CRI-O reports the network as not ready, with the error. Once the cause is gone, it soon reports it as
// ready without a restart.
func TestStatus(t *testing.T) {
	c := cri.Open(t, socket)
	shipped, err := conf.Conflist(conf.Default)
	if err != nil {
		t.Fatal(err)
	}
	kubernetes, err := conf.Conflist("10-podlace-kubernetes.conflist")
	if err != nil {
		t.Fatal(err)
	}
	const nodeFile = "/run/podlace/node.json"
	for _, test := range []struct {
		name, conflist, says string
		repair               func()
	}{
		{"no node.json", string(kubernetes), nodeFile, func() {
			replaceFile(t, nodeFile, `{"podCIDRs":["10.244.1.0/24","fd00:10:244:1::/64"],"clusterCIDRs":["10.244.0.0/16","fd00:10:244::/56"]}`)
		}},
		{"wrong value", strings.Replace(string(shipped), "10.58.0.0/16", "10.58.0.0/99", 1), "10.58.0.0/99", func() {
			replaceFile(t, conflistPath(t), string(shipped))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Cleanup(func() {
				replaceFile(t, conflistPath(t), string(shipped))
				_ = os.Remove(nodeFile)
				err := cri.Eventually(context.Background(), 20*time.Second, func() error { return c.Ready(context.Background()) })
				if err != nil {
					t.Error(err)
				}
			})
			cri.ExpectReady(t, c)
			replaceFile(t, conflistPath(t), test.conflist)
			checkWithin(t, 20*time.Second, "the network is not ready", func() error {
				err := c.Ready(t.Context())
				if err == nil || !strings.Contains(err.Error(), "NetworkReady is false") || !strings.Contains(err.Error(), test.says) {
					return fmt.Errorf("%w: want one about %s", errors.Join(err, errors.New("CRI-O's status")), test.says)
				}
				t.Log(err)
				return nil
			})
			test.repair()
			checkWithin(t, 20*time.Second, "the network is ready", func() error { return c.Ready(t.Context()) })
		})
	}
}

// conflistPath returns the path of the conflist that CRI-O uses.
func conflistPath(t *testing.T) string {
	t.Helper()
	config, err := os.ReadFile("/run/node/crio.conf")
	_, dir, _ := strings.Cut(string(config), `network_dir = "`)
	dir, _, ok := strings.Cut(dir, `"`)
	if err != nil || !ok {
		t.Fatalf("%s: %v", config, err)
	}
	return filepath.Join(dir, conf.Default)
}

// replaceFile replaces a file atomically.
func replaceFile(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

// TestWhoMaps: CRI-O maps hostPorts itself and passes none to portmap, so they are unreachable while its mapping is disabled.
func TestWhoMaps(t *testing.T) {
	c := cri.Open(t, socket)
	const port, file = 18092, "/run/node/crio.conf"
	mapped := cri.RunPod(t, c, "mapped", cri.HostPort(port))
	mapped.Serves(cri.OutsideNetns, mapped.OnNode4(port))
	checkUnmapped(t, mapped)
	mapped.Remove()
	config, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	use := func(text string) func() { return func() { replaceFile(t, file, text) } }
	const section, off = "[crio.runtime]\n", "disable_hostport_mapping = true\n"
	restartCRIO(t, c, syscall.SIGTERM, use(strings.Replace(string(config), section, section+off, 1)))
	nobodys := cri.RunPod(t, c, "nobodys", cri.HostPort(port))
	nobodys.Ignores(cri.OutsideNetns, nobodys.OnNode4(port))
	checkUnmapped(t, nobodys)
	nobodys.Remove()
	restartCRIO(t, c, syscall.SIGTERM, use(string(config)))
}

// checkUnmapped checks that the bridge plugin has a record of the pod, and that portmap has no record of the pod.
func checkUnmapped(t *testing.T, p *cri.Pod) {
	t.Helper()
	all := strings.Join(podRecords(t, "shop/"+p.Name), " ")
	if strings.Contains(all, "/portmap-") || !strings.Contains(all, "/bridge-") {
		t.Errorf("records of pod %s: %s: want one of bridge and none of portmap", p.Name, all)
	}
}
