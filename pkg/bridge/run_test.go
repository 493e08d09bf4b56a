// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

type object = kerneltest.Object

// lab is a node on which the network of a configuration exists, and a pod.
type lab struct {
	*testing.T
	plugin plugin.Plugin
	conf   object
	pod    *sandbox.Pod
	path   string // CNI_PATH
}

func dualStack() object {
	return object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.60.0.0/24"}}, []any{object{"subnet": "fd00:60::/64"}}},
		"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}}
}

// bareLab is a node without the network.
func bareLab(t *testing.T, keys ...any) lab {
	t.Helper()
	if err := flushNFT(); err != nil {
		t.Fatal(err)
	}
	return lab{T: t, plugin: Plugin(hostlocal.Plugin()), pod: kerneltest.NewPod(t), path: "/nonexistent",
		conf: object{"cniVersion": "1.1.0", "name": "net", "type": "bridge",
			"bridge": "bt0", "isGateway": true, "ipMasq": true, "hairpinMode": true, "ipam": dualStack()}.With(keys...)}
}

// newLab makes the network ready by a first pod that goes again, so that the oracle sees only what later pods leave.
func newLab(t *testing.T, keys ...any) lab {
	t.Helper()
	l := bareLab(t, keys...)
	first := l.other()
	first.add("first")
	first.ok(first.call("DEL", "first"))
	kerneltest.Clean(t, l.pod)
	return l
}

// other is the same node with another pod.
func (l lab) other() lab {
	l.Helper()
	l.pod = kerneltest.NewPod(l.T)
	return l
}

// outcome is the result or the error of a call.
type outcome struct {
	exit    int
	stdout  []byte
	log     string
	failure struct {
		Code    uint   `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details"`
	}
}

// call runs a verb on the pod's eth0 with more keys in the configuration. A key in capitals is a variable of the environment.
func (l lab) call(verb, id string, keys ...any) outcome {
	l.Helper()
	env := map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_NETNS": l.pod.Path, "CNI_PATH": l.path}
	stdin, err := json.Marshal(l.conf.Call(env, keys...))
	if err != nil {
		l.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	o := outcome{exit: l.plugin.Run(func(name string) string { return env[name] }, bytes.NewReader(stdin), &stdout, &stderr)}
	o.stdout, o.log = stdout.Bytes(), stderr.String()
	if err := json.Unmarshal(o.stdout, &o.failure); err != nil && len(o.stdout) > 0 {
		l.Errorf("%s: %v in %s", verb, err, o.stdout)
	}
	return o
}

func (l lab) ok(o outcome) outcome {
	l.Helper()
	if o.exit != 0 {
		l.Fatalf("exit %d: %s", o.exit, o.stdout)
	}
	return o
}

// fails wants a code and a part of the message.
func (l lab) fails(o outcome, code uint, says string) {
	l.Helper()
	if o.exit != 1 || o.failure.Code != code || !strings.Contains(o.failure.Msg, says) {
		l.Errorf("exit %d, %s: want code %d and %q", o.exit, o.stdout, code, says)
	}
}

// attached is a pod with the result of its ADD.
type attached struct {
	lab
	id     string
	prev   json.RawMessage
	result types100.Result
}

// add attaches the pod and takes it away at the end of the test.
func (l lab) add(id string, keys ...any) attached {
	l.Helper()
	a := attached{lab: l, id: id, prev: l.ok(l.call("ADD", id, keys...)).stdout}
	l.Cleanup(func() { l.ok(l.call("DEL", id)) })
	if err := json.Unmarshal(a.prev, &a.result); err != nil {
		l.Fatal(err)
	}
	return a
}

func (a attached) check(keys ...any) outcome {
	a.Helper()
	return a.call("CHECK", a.id, append([]any{"prevResult", a.prev}, keys...)...)
}

// loseRecord deletes the record of the attachment.
func (a attached) loseRecord() {
	a.Helper()
	if err := os.Remove(filepath.Join(store.Root, a.network(), "bridge-"+key(a.network(), a.id).Hash())); err != nil {
		a.Fatal(err)
	}
}

func (l lab) network() string { return l.conf["name"].(string) }

// age lets all records and leases look old, so that GC may collect them.
func (l lab) age() {
	l.Helper()
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		l.Fatal(err)
	}
}

// hostVeth returns the name of the host side.
func (a attached) hostVeth() string { return a.result.Interfaces[1].Name }

// onHost changes the link name on the host; inPod does it in the pod.
func onHost(name string, change func(netlink.Link) error) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return change(link)
}

func (l lab) inPod(name string, change func(netlink.Link) error) error {
	return l.pod.Do(func() error { return onHost(name, change) })
}

func flushNFT() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.FlushRuleset()
	return c.Flush()
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
