// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// A node runs the programs of one folder. They are replaced while its pods run.
type node struct {
	*testing.T
	bin, cache string
	networks   []*harness.Network
	installed  *version
	pods       []*pod
	lan        *sandbox.Pod
	step       string // what happened last
}

// newNode returns a node without pods whose networks have the given shipped conflists.
func newNode(t *testing.T, conflists ...string) *node {
	t.Helper()
	n := &node{T: t, bin: t.TempDir(), cache: t.TempDir()}
	for _, name := range conflists {
		conflist, err := conf.Conflist(name)
		kerneltest.Must(t, err)
		network, err := harness.OpenNetwork(conflist, n.cache, nil)
		kerneltest.Must(t, err)
		network.CNI = libcni.NewCNIConfigWithCacheDir([]string{n.bin}, n.cache, network.Exec())
		n.networks = append(n.networks, network)
	}
	t.Cleanup(n.wipe)
	return n
}

// then runs a step. After a failed step, the test ends, because later steps would only repeat its errors.
func (n *node) then(step string, do func()) {
	n.Helper()
	n.step = step
	start := time.Now()
	do()
	n.Logf("%s: %.1f s", step, time.Since(start).Seconds())
	if n.Failed() {
		n.FailNow()
	}
}

// wrong reports an error of the current step.
func (n *node) wrong(format string, args ...any) {
	n.Helper()
	n.Errorf(n.step+": "+format, args...)
}

// install replaces the programs as make install does.
func (n *node) install(v *version) {
	n.Helper()
	n.installed = v
	script, err := filepath.Abs("../../scripts/install.sh")
	kerneltest.Must(n, err)
	if out, err := exec.Command(script, append([]string{v.folder, n.bin}, programs()...)...).CombinedOutput(); err != nil {
		n.Fatalf("install.sh: %v: %s", err, out)
	}
}

// verb runs a verb of one network, and reports its error.
func (n *node) verb(verb string, network *harness.Network, rt *libcni.RuntimeConf, valid ...types.GCAttachment) types.Result {
	n.Helper()
	network.Stderr.Reset()
	result, err := network.Do(verb, rt, valid)
	if err != nil {
		n.wrong("%s of %s: %v\n%s", verb, network.List.Name, err, network.Stderr.String())
	}
	return result
}

// status runs STATUS of each network.
func (n *node) status() {
	n.Helper()
	for _, network := range n.networks {
		n.verb("STATUS", network, nil)
	}
}

// collect runs GC of each network. All pods are valid, but old enough for GC to end them by mistake.
func (n *node) collect() {
	n.Helper()
	kerneltest.Must(n, kerneltest.Age(harness.StateDirs()...))
	for _, network := range n.networks {
		var valid []types.GCAttachment
		for _, p := range n.pods {
			for _, a := range p.attachments {
				if a.network == network {
					valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
				}
			}
		}
		n.verb("GC", network, nil, valid...)
	}
}

// reload runs podlace reload, which fails if it cannot read a record.
func (n *node) reload() {
	n.Helper()
	out, err := exec.Command(filepath.Join(n.bin, "podlace"), "reload").CombinedOutput()
	refused := len(n.readable()) < len(n.pods) && strings.Contains(string(out), "its format is ")
	if err != nil && !refused {
		n.wrong("podlace reload: %v: %s", err, out)
	}
}

// wipe removes everything that pods and plugins leave on the node, but no sysctl.
func (n *node) wipe() {
	n.Helper()
	for _, p := range n.pods {
		p.close(n.T)
	}
	n.pods = nil
	for _, kind := range []string{"bridge", "veth", "ifb"} {
		for line := range strings.Lines(harness.Shell(n, "ip -o link show type "+kind)) {
			name, _, _ := strings.Cut(strings.Fields(line)[1], "@")
			if name = strings.TrimSuffix(name, ":"); name != "lan0" {
				_ = exec.Command("ip", "link", "del", name).Run() // the other end of a pair is gone already
			}
		}
	}
	kerneltest.Must(n, kerneltest.FlushNFT())
	for _, folder := range harness.StateDirs() {
		kerneltest.Must(n, os.RemoveAll(folder))
	}
}

// oracle returns the node's state after the last pod of each version. It includes a flush, because a restored rule can stand at another
// place.
func (n *node) oracle(lives ...*version) *harness.Oracle {
	n.Helper()
	for _, v := range lives {
		n.then("a first pod of the "+v.name+" programs", func() {
			n.install(v)
			p := n.add(fmt.Sprint("first-", v.name), 0)
			v.format = p.format(n)
			n.flush()
			n.status()
			n.collect()
			n.reload()
			n.end(p)
		})
	}
	n.fixMACs()
	o := harness.Watch(n)
	n.wipe()
	return o
}

// fixMACs gives each bridge a fixed MAC, because random ones would differ between equal states.
func (n *node) fixMACs() {
	n.Helper()
	harness.Shell(n, "ip link set cni0 address 02:00:00:00:00:01; ip link set br-lan address 02:00:00:00:00:02")
}

// flush removes the rules of both backends, as a reload of another firewall does.
func (n *node) flush() {
	n.Helper()
	kerneltest.Must(n, kerneltest.FlushNFT())
}
