// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) {
	if os.Getenv("BRIDGE_TENANT") != "" {
		os.Exit(tenantMain())
	}
	kerneltest.Main(m)
}

type (
	object  = kerneltest.Object
	outcome = kerneltest.Outcome
)

// lab is a node with one pod and one configured network.
type lab struct {
	kerneltest.Lab
}

func dualStack() object {
	return object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.60.0.0/24"}}, []any{object{"subnet": "fd00:60::/64"}}},
		"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}}
}

// bareLab returns a node on which the network does not exist yet.
func bareLab(t *testing.T, keys ...any) lab {
	t.Helper()
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	return lab{kerneltest.Lab{T: t, Plugin: Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(t),
		Conf: object{"cniVersion": "1.1.0", "name": "net", "type": "bridge",
			"bridge": "bt0", "isGateway": true, "ipMasq": true, "hairpinMode": true, "ipam": dualStack()}.With(keys...)}}
}

// newLab adds and deletes a first pod, so that the network exists and the leak check at the end sees only later pods.
func newLab(t *testing.T, keys ...any) lab {
	t.Helper()
	l := bareLab(t, keys...)
	first := l.other()
	first.add("first")
	first.OK(first.Call("DEL", "first"))
	kerneltest.Clean(t, l.Pod)
	return l
}

// other returns a lab for another pod on the same node.
func (l lab) other() lab {
	l.Helper()
	l.Pod = kerneltest.NewPod(l.T)
	return l
}

// attached is a pod with the result of its ADD.
type attached struct {
	lab
	id     string
	prev   json.RawMessage
	result types100.Result
}

// add attaches the pod until the test ends.
func (l lab) add(id string, keys ...any) attached {
	l.Helper()
	a := attached{lab: l, id: id, prev: l.OK(l.Call("ADD", id, keys...)).Stdout}
	l.Cleanup(func() { l.OK(l.Call("DEL", id)) })
	if err := json.Unmarshal(a.prev, &a.result); err != nil {
		l.Fatal(err)
	}
	return a
}

func (a attached) check(keys ...any) outcome {
	a.Helper()
	return a.Call("CHECK", a.id, append([]any{"prevResult", a.prev}, keys...)...)
}

func (a attached) loseRecord() {
	a.Helper()
	if err := os.Remove(filepath.Join(store.Root, a.network(), "bridge-"+key(a.network(), a.id).Hash())); err != nil {
		a.Fatal(err)
	}
}

func (l lab) network() string { return l.Conf["name"].(string) }

// age makes all records and leases so old that GC may collect them.
func (l lab) age() {
	l.Helper()
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		l.Fatal(err)
	}
}

func (a attached) hostVeth() string { return a.result.Interfaces[1].Name }

// onHost calls change for a link on the node, inPod for one in the pod.
func onHost(name string, change func(netlink.Link) error) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return change(link)
}

func (l lab) inPod(name string, change func(netlink.Link) error) error {
	return l.Pod.Do(func() error { return onHost(name, change) })
}

func (l lab) run(command string) string {
	l.Helper()
	out, err := exec.Command("sh", "-c", command).CombinedOutput()
	if err != nil {
		l.Fatalf("%s: %v %s", command, err, out)
	}
	return string(out)
}

// flushSet empties the masquerade sets whose names begin with a prefix.
func flushSet(prefix string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	sets, err := c.GetSets(&nftables.Table{Name: "podlace_masquerade", Family: nftables.TableFamilyINet})
	if err != nil {
		return err
	}
	for _, s := range sets {
		if strings.HasPrefix(s.Name, prefix) {
			c.FlushSet(s)
		}
	}
	return c.Flush()
}
