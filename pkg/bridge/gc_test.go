// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

func key(network, id string) attachment.Key {
	return attachment.Key{Network: network, ContainerID: id, IfName: "eth0"}
}

// TestGC: GC removes invalid attachments as completely as DEL, and keeps valid ones.
func TestGC(t *testing.T) {
	l := newLab(t)
	kept := l.add("kept")
	gone := l
	gone.Pod = kerneltest.NewPod(t)
	gone.add("gone")
	l.age()
	valid := []any{object{"containerID": "kept", "ifname": "eth0"}, object{"containerID": "gone", "ifname": "net1"}}
	for range 2 {
		l.OK(l.Call("GC", "", "cni.dev/valid-attachments", valid))
		l.OK(kept.check())
		if len(listLeases(t)) != 2 {
			t.Errorf("left the leases %v", listLeases(t))
		}
		if err := gone.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
			t.Error("the pod still has its interface")
		}
	}
}

// TestGCStrayFile: GC ignores a file whose name only begins like a record's. For an unreadable record, it removes the links with the hash
// in the file's name.
func TestGCStrayFile(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	record := filepath.Join(store.Root, l.network(), "bridge-"+key(l.network(), "a").Hash())
	dead := strings.Repeat("0", 16)
	strays := []string{record + ".bak", record + "0", record[:len(record)-16],
		record[:len(record)-16] + strings.ToUpper(record[len(record)-16:])}
	torn := record[:len(record)-16] + dead
	for _, path := range append(strays, torn) {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: attachment.HostVeth(dead)}, PeerName: "deadp0"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onHost("deadp0", netlink.LinkDel) })
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
	l.OK(a.check())
	for _, path := range strays {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(torn); err == nil || onHost("deadp0", func(netlink.Link) error { return nil }) == nil {
		t.Errorf("the torn record or its state is left: %v", err)
	}
}

// TestGCRandom (C-80): GC of one network keeps exactly its valid attachments, and leaves another network on the node alone.
func TestGCRandom(t *testing.T) {
	kerneltest.Slow(t)
	const attachments = 50
	nets := []lab{newLab(t), {}} // an attachment is one interface of one pod
	nets[1] = nets[0]
	nets[1].Conf = nets[0].Conf.With("name", "net2", "isGateway", nil, "ipMasq", nil, "ipam",
		object{"type": "host-local", "subnet": "10.61.0.0/24"})
	owned := map[string]map[plugin.Attachment]bool{"net": {}, "net2": {}}
	t.Cleanup(func() {
		for _, l := range nets {
			l.age()
			l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{}))
		}
	})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 2 {
		for i := range attachments {
			// Each container ID is the beginning of the next longer one, such as a and a-b.
			l, of := nets[i%2], plugin.Attachment{ContainerID: "a" + strings.Repeat("-b", i/8), IfName: fmt.Sprintf("e%d", i)}
			if set := owned[l.network()]; !set[of] {
				l.OK(l.Call("ADD", of.ContainerID, "CNI_IFNAME", of.IfName))
				set[of] = true
			}
		}
		l := nets[random.IntN(2)]
		l.age()
		valid := []any{object{"containerID": "a", "ifname": "none"}, object{"containerID": "unknown", "ifname": "e1"}}
		for of := range owned[l.network()] {
			if random.IntN(2) == 0 {
				delete(owned[l.network()], of)
				continue
			}
			valid = append(valid, object{"containerID": of.ContainerID, "ifname": of.IfName})
		}
		l.OK(l.Call("GC", "", "cni.dev/valid-attachments", valid))
		for _, l := range nets {
			l.mustOwn(owned[l.network()])
		}
	}
}

// mustOwn expects records, leases and interfaces for exactly these attachments.
func (l lab) mustOwn(want map[plugin.Attachment]bool) {
	l.Helper()
	records, err := attachment.List(l.network(), "bridge")
	if err != nil {
		l.Fatal(err)
	}
	recorded := map[plugin.Attachment]bool{}
	for _, rec := range records {
		recorded[rec.Attachment()] = true
		if err := onHost(rec.HostVeth(), func(netlink.Link) error { return nil }); err != nil {
			l.Errorf("%v: host side: %v", rec.Key, err)
		}
		if err := l.inPod(rec.IfName, func(netlink.Link) error { return nil }); err != nil {
			l.Errorf("%v: pod side: %v", rec.Key, err)
		}
	}
	if diff := cmp.Diff(want, recorded); diff != "" {
		l.Errorf("records of %s (-want +got):\n%s", l.network(), diff)
	}
	leased := map[plugin.Attachment]bool{}
	paths, _ := filepath.Glob("/var/lib/cni/networks/" + l.network() + "/1*")
	for _, path := range paths {
		data, err := os.ReadFile(path)
		id, ifname, ok := strings.Cut(string(data), "\r\n")
		if err != nil || !ok {
			l.Errorf("%s: %q, %v", path, data, err)
		}
		leased[plugin.Attachment{ContainerID: id, IfName: ifname}] = true
	}
	if diff := cmp.Diff(want, leased); diff != "" {
		l.Errorf("leases of %s (-want +got):\n%s", l.network(), diff)
	}
}

// TestGCWhileAdding (C-85): with an outdated list of valid attachments, GC removes no live pod while pods are added and deleted. In "plain"
// it skips young attachments that are not in the list; in "named" the list of dead ones contains a pod that a new ADD has attached again.
func TestGCWhileAdding(t *testing.T) {
	kerneltest.Slow(t)
	for name, keys := range map[string][]any{
		"plain": {"cni.dev/valid-attachments", []any{}},
		"named": {"cni.dev/valid-attachments", []any{}, "podlace/dead-attachments", []any{object{"containerID": "pod", "ifname": "eth0"}}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			rounds := l.collectAllTheTime(keys...)
			judged := 0
			for i := range 100 {
				began := time.Now()
				prev := l.OK(l.Call("ADD", "pod")).Stdout
				if name == "named" {
					l.age()
				} else {
					kerneltest.Must(t, kerneltest.KeepYoung(kerneltest.StateDirs()...))
				}
				// GC may remove the pod if the machine stalled up to here.
				young := time.Since(began) < time.Second
				if i%2 == 0 { // this GC began after the ADD had ended
					<-rounds
					<-rounds
				}
				o := l.Call("CHECK", "pod", "prevResult", json.RawMessage(prev))
				if name == "named" || young {
					l.OK(o)
					judged++
				}
				l.OK(l.Call("DEL", "pod"))
			}
			if judged < 50 {
				t.Errorf("%d of 100 pods were judged", judged)
			}
		})
	}
}

// collectAllTheTime repeats GC until the test ends. After each one it sends on the channel if a receiver is waiting.
func (l lab) collectAllTheTime(keys ...any) (rounds <-chan bool) {
	ended, stop, stopped := make(chan bool), make(chan bool), make(chan bool)
	go func() {
		defer close(stopped)
		for {
			if o := l.Call("GC", "", keys...); o.Exit != 0 {
				l.Errorf("GC: %s", o.Stdout)
			}
			select {
			case <-stop:
				return
			case ended <- true:
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	l.Cleanup(func() {
		close(stop)
		<-stopped
	})
	return ended
}

// TestGCAgain (C-85): a later GC removes the young attachments that an earlier one skipped.
func TestGCAgain(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	a := l.add("a")
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{}))
	l.OK(a.check())
	l.age()
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{}))
	l.mustOwn(map[plugin.Attachment]bool{})
}

// TestShortPool: an ADD that finds no free address removes pods whose namespace is gone, with all their state, and uses an address of
// theirs. Otherwise it does not look for dead pods.
func TestShortPool(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) { testShortPool(t, backend) })
	}
}

func testShortPool(t *testing.T, backend string) {
	if _, err := exec.LookPath("iptables"); err != nil && backend == "iptables" {
		t.Skip("SKIPPED: no iptables program")
	}
	l := newLab(t, "name", "short-"+backend, "bridge", "bts-"+backend[:4], "ipMasqBackend", backend, "ipam",
		object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.62.0.0/29"}}}})
	alive := l.add("alive")
	lost := []string{"lost1", "lost2", "lost3"}
	for _, id := range lost {
		gone := l
		gone.Pod = kerneltest.NewPod(t)
		gone.OK(gone.Call("ADD", id))
		if err := gone.Pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	next := l
	next.Pod = kerneltest.NewPod(t)
	next.add("fits")
	if left := l.recordCount(lost...); left != 3 {
		t.Errorf("an ADD that found an address collected: %d records of 3 are left", left)
	}
	next.Pod = kerneltest.NewPod(t)
	last := next.add("last")
	l.OK(last.check())
	l.OK(alive.check())
	if left := l.recordCount(lost...); left != 0 {
		t.Errorf("%d records of pods that are gone are left", left)
	}
	if backend == "iptables" {
		rules, err := exec.Command("iptables", "-t", "nat", "-S").Output()
		if err != nil || strings.Contains(string(rules), "lost") || !strings.Contains(string(rules), "alive") {
			t.Errorf("%v\n%s", err, rules)
		}
	}
}

// TestAddressOfDead: ADD gets a requested address from a pod whose namespace is gone, but not from a living one.
func TestAddressOfDead(t *testing.T) {
	l := newLab(t, "name", "wish", "bridge", "btwish", "ipam",
		object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.62.1.0/24"}}}})
	gone := l
	gone.Pod = kerneltest.NewPod(t)
	gone.OK(gone.Call("ADD", "gone"))
	if err := gone.Pod.Close(); err != nil {
		t.Fatal(err)
	}
	l.Conf = l.Conf.With("args", object{"cni": object{"ips": []string{"10.62.1.3"}}})
	l.OK(l.add("heir").check())
	if l.recordCount("gone") != 0 {
		t.Error("the record of the pod that is gone is left")
	}
	other := l
	other.Pod = kerneltest.NewPod(t)
	l.Fails(other.Call("ADD", "other"), plugin.CodeAddressTaken, "it is leased to container heir")
}

func (l lab) recordCount(ids ...string) int {
	l.Helper()
	records, err := attachment.List(l.network(), "bridge")
	if err != nil {
		l.Fatal(err)
	}
	n := 0
	for _, rec := range records {
		if slices.Contains(ids, rec.ContainerID) {
			n++
		}
	}
	return n
}

// TestShortPoolOfOthers: if the pool of an external IPAM plugin is exhausted, ADD releases dead pods' addresses and tries once more.
func TestShortPoolOfOthers(t *testing.T) {
	l := newLab(t)
	f := &fakeIPAM{answer: `"ips":[{"address":"10.60.0.9/24"}]`}
	l.Plugin, l.Conf = Plugin(f.plugin(t)).Run, l.Conf.With("ipam", object{"type": "fake"})
	l.add("alive")
	full := plugin.Errorf(plugin.CodeExhausted, "full")
	f.addErr, f.added = full, 0
	other := l
	other.Pod = kerneltest.NewPod(t)
	l.Fails(other.Call("ADD", "next"), plugin.CodeExhausted, "full")
	if f.added != 1 || f.given != 0 {
		t.Errorf("no pod is dead: %d ADD, %d DEL", f.added, f.given)
	}
	f.addErr = nil
	gone := l
	gone.Pod = kerneltest.NewPod(t)
	gone.OK(gone.Call("ADD", "gone"))
	if err := gone.Pod.Close(); err != nil {
		t.Fatal(err)
	}
	f.addErr, f.added = full, 0
	f.onDel = func() { f.addErr = nil }
	other.add("next")
	if f.added != 2 || f.given != 1 || l.recordCount("gone") != 0 || l.recordCount("alive") != 1 {
		t.Errorf("%d ADD, %d DEL, %d records of the dead, %d of the living", f.added, f.given, l.recordCount("gone"), l.recordCount("alive"))
	}
}

// fakeIPAM is an in-process IPAM plugin, whose ADD and DEL return addErr and delErr.
type fakeIPAM struct {
	answer         string
	addErr, delErr error
	added, given   int
	onDel          func()
}

func (f *fakeIPAM) plugin(t *testing.T) plugin.Plugin {
	return plugin.Plugin{Name: "fake",
		Add: func(*plugin.Request) (*types100.Result, error) {
			if f.added++; f.addErr != nil {
				return nil, f.addErr
			}
			return ipamResult(t, f.answer), nil
		},
		Del: func(*plugin.Request) error {
			if f.given++; f.onDel != nil {
				f.onDel()
			}
			return f.delErr
		},
	}
}

// TestIPAMFails: ADD returns the error code of the IPAM plugin and does not change the pod.
func TestIPAMFails(t *testing.T) {
	for what, f := range map[string]*fakeIPAM{
		"fails":            {addErr: plugin.Errorf(plugin.CodeExhausted, "full")},
		"has bad gateways": {answer: `"ips":[{"address":"10.60.0.9/24","gateway":"fd00::1"}]`},
		"has bad routes":   {answer: `"ips":[{"address":"10.60.0.9/24"}],"routes":[{"dst":"192.0.2.0/24","gw":"203.0.113.7"}]`},
	} {
		l := newLab(t)
		l.Plugin = Plugin(f.plugin(t)).Run
		o := l.Call("ADD", "a", "ipam", object{"type": "fake"})
		given := 1
		if f.addErr != nil {
			given = 0 // returns no address
		}
		if o.Exit != 1 || f.added != 1 || f.given != given {
			t.Errorf("%s: exit %d, %d ADD, %d DEL: %s", what, o.Exit, f.added, f.given, o.Stdout)
		}
		if f.addErr != nil {
			l.Fails(o, plugin.CodeExhausted, "bridge add: ipam fake: full")
		}
	}
}
