// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/pci/pcitest"
	"github.com/podlace/podlace/pkg/podresources"
)

const (
	resource = "example.com/fast"
	variable = "PCIDEVICE_EXAMPLE_COM_FAST"
	pools    = `{"resourceList": [{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {"vendors": ["8086"], "devices": ["1889"]}}]}`
	allVFs   = 16
)

// cards is the node's hardware: two PFs of four VFs on each NUMA node.
func cards(t *testing.T) (sysfs string) {
	return pcitest.Generate(t, pcitest.Machine{Nodes: numaNodes, PFs: 2, VFs: 4, InPods: true, CPUs: cpusEach})
}

// plugin is the device plugin's daemon.
type plugin struct {
	process
	bin, dir, sysfs string
	registration    string // registration: classic or registry
}

func newPlugin(t *testing.T, sysfs, registration string) *plugin {
	t.Helper()
	bin, err := node.Plugins()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := &plugin{process{t: t, log: filepath.Join(dir, "plugin.log")}, bin, dir, sysfs, registration}
	if err := os.WriteFile(p.config(), []byte(pools), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.end(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("device plugin:\n%s", p.tail(""))
		}
	})
	return p
}

func (p *plugin) config() string { return filepath.Join(p.dir, "config.json") }

// socket is the path of the plugin's socket. It is not in t.TempDir, whose path is too long for a unix socket.
func (p *plugin) socket() string { return "/run/podlace-sriov/sriov.sock" }

// run starts the daemon as conf/cluster/components/sriov/sriov-device-plugin.yaml does: as root, without any capability.
func (p *plugin) run() {
	p.t.Helper()
	p.start("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", filepath.Join(p.bin, "sriov-device-plugin"),
		"--config-file", p.config(), "--sysfs", p.sysfs, "--poll", "1s",
		"--registration", p.registration, "--http", "unix:/run/node/plugin.sock", "--cdi-dir", "")
}

// ready waits until the kubelet watches all resources, and returns the time that this took.
func (p *plugin) ready(limit time.Duration) time.Duration {
	p.t.Helper()
	begin := time.Now()
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", "/run/node/plugin.sock")
		}}}
	within(p.t, limit, "the device plugin is ready", func() error {
		r, err := client.Get("http://plugin/readyz")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return fmt.Errorf("readyz: %s", r.Status)
		}
		return nil
	})
	return time.Since(begin)
}

// list is the output of podlace sriov ls.
func (p *plugin) list() string {
	p.t.Helper()
	out, err := p.podlace("ls")
	if err != nil {
		p.t.Errorf("podlace sriov ls: %v\n%s", err, out)
	}
	return out
}

// podlace runs podlace sriov, and returns its output.
func (p *plugin) podlace(args ...string) (string, error) {
	args = append([]string{"sriov"}, append(args, "--config-file", p.config(), "--sysfs", p.sysfs, "--socket", p.socket())...)
	out, err := exec.Command(filepath.Join(p.bin, "podlace"), args...).CombinedOutput()
	return string(out), err
}

// numaOf returns the NUMA node of a device in the current sysfs.
func (p *plugin) numaOf(address string) int {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join(p.sysfs, "bus/pci/devices", address, "numa_node"))
	if err != nil {
		p.t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		p.t.Fatal(err)
	}
	return n
}

// kubeletFor returns a client that asks the kubelet for the devices of a resource.
func kubeletFor(of string) podresources.Kubelet {
	k := podresources.At(kubeletRoot)
	k.Resources = []string{of}
	return k
}

// holders asks the kubelet for the devices of a resource and their pods.
func holders(t *testing.T, of string) []allocation.Device {
	t.Helper()
	held, err := podresources.List(t.Context(), kubeletFor(of))
	if err != nil {
		t.Fatal(err)
	}
	return held
}
