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
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/poddevices"
)

const (
	resource = "example.com/fast"
	variable = "PCIDEVICE_EXAMPLE_COM_FAST"
	pools    = `{"resourceList": [{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {"vendors": ["8086"], "devices": ["1889"]}}]}`
	allVFs   = 16
)

// generateCards creates a sysfs tree with the node's hardware: two PFs with four VFs each on each NUMA node.
func generateCards(t *testing.T) (sysfs string) {
	return pcitest.Generate(t, pcitest.Machine{Nodes: numaNodes, PFs: 2, VFs: 4, InPods: true, CPUs: cpusEach})
}

// devicePlugin is the daemon sriov-device-plugin.
type devicePlugin struct {
	testProcess
	bin, dir, sysfs string
	registration    string // registration: classic or registry
}

func newPlugin(t *testing.T, sysfs, registration string) *devicePlugin {
	t.Helper()
	bin, err := node.Plugins()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := &devicePlugin{testProcess{t: t, log: filepath.Join(dir, "plugin.log")}, bin, dir, sysfs, registration}
	if err := os.WriteFile(p.config(), []byte(pools), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.endProgram(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("device plugin:\n%s", p.tailLog(""))
		}
	})
	return p
}

func (p *devicePlugin) config() string { return filepath.Join(p.dir, "config.json") }

// socketPath returns the daemon's socket, which is not in t.TempDir because its paths are too long for a unix socket.
func (p *devicePlugin) socketPath() string { return "/run/podlace-sriov/sriov.sock" }

// runDaemon starts the daemon as root without any capability, like conf/cluster/components/sriov/sriov-device-plugin.yaml.
func (p *devicePlugin) runDaemon() {
	p.t.Helper()
	p.startProgram("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", filepath.Join(p.bin, "sriov-device-plugin"),
		"--config-file", p.config(), "--sysfs", p.sysfs, "--poll", "1s",
		"--registration", p.registration, "--http", "unix:/run/node/plugin.sock", "--cdi-dir", "")
}

// awaitReady waits until the kubelet watches all resources of the plugin, and returns this time. It then waits until the list of VFs was
// read, because a pod that is admitted earlier never gets one.
func (p *devicePlugin) awaitReady(limit time.Duration) time.Duration {
	p.t.Helper()
	begin := time.Now()
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", "/run/node/plugin.sock")
		}}}
	checkWithin(p.t, limit, "the device plugin is ready", func() error {
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
	ready := time.Since(begin)
	checkWithin(p.t, limit, "the kubelet has all VFs", func() error {
		devices, _, err := podresources.Allocatable(p.t.Context(), podresources.At(kubeletRoot))
		if err == nil && len(devices) < allVFs {
			err = fmt.Errorf("it has %d devices", len(devices))
		}
		return err
	})
	return ready
}

// listDevices returns the output of `podlace sriov ls`.
func (p *devicePlugin) listDevices() string {
	p.t.Helper()
	out, err := p.runPodlace("ls")
	if err != nil {
		p.t.Errorf("podlace sriov ls: %v\n%s", err, out)
	}
	return out
}

// runPodlace runs `podlace sriov` and returns its output.
func (p *devicePlugin) runPodlace(args ...string) (string, error) {
	args = append([]string{"sriov"}, append(args, "--config-file", p.config(), "--sysfs", p.sysfs, "--socket", p.socketPath())...)
	out, err := exec.Command(filepath.Join(p.bin, "podlace"), args...).CombinedOutput()
	return string(out), err
}

// numaOf returns the NUMA node of a device in the generated sysfs tree.
func (p *devicePlugin) numaOf(address string) int {
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

// kubeletFor returns a client of the kubelet for the devices of one resource.
func kubeletFor(of string) podresources.Kubelet {
	k := podresources.At(kubeletRoot)
	k.Resources = []string{of}
	return k
}

// heldDevices returns the allocated devices of a resource and their pods, as the kubelet reports them.
func heldDevices(t *testing.T, of string) []poddevices.Device {
	t.Helper()
	held, err := podresources.List(t.Context(), kubeletFor(of))
	if err != nil {
		t.Fatal(err)
	}
	return held
}
