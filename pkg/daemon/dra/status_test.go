// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// writeJournal writes the journal of a VF with the same content as ADD.
func (l *draLab) writeJournal(c *resourceapi.ResourceClaim, address, pod, netns string, ips ...string) {
	l.Helper()
	r, err := claim.Read(l.options.Claims, string(c.UID))
	must(l, err)
	for _, d := range r.Devices {
		if d.ID != address {
			continue
		}
		j := map[string]any{"format": 1, "address": address, "owner": map[string]string{"Network": "net", "ContainerID": pod, "IfName": "eth0"},
			"pod": "shop/" + pod, "netns": netns, "name": "net1", "mac": "02:00:00:00:00:01", "since": time.Now().Truncate(time.Second),
			"claim": d.Claim, "ips": prefixes(l, ips), "ready": !l.adding, "vlan": 7, "former": map[string]string{"driver": "iavf"}}
		data, err := json.Marshal(j)
		must(l, err, os.MkdirAll(sriov.JournalFolder, 0o700), os.WriteFile(filepath.Join(sriov.JournalFolder, address), data, 0o600))
	}
}

func prefixes(t testing.TB, ips []string) (list []netip.Prefix) {
	for _, ip := range ips {
		p, err := netip.ParsePrefix(ip)
		must(t, err)
		list = append(list, p)
	}
	return list
}

func (l *draLab) detach(address string) {
	l.Helper()
	must(l, os.Remove(filepath.Join(sriov.JournalFolder, address)))
}

// statusTexts returns the entries of a claim's status as text.
func (l *draLab) statusTexts(name string) (list []string) {
	l.Helper()
	c, err := l.client.ResourceV1().ResourceClaims("shop").Get(l.Context(), name, metav1.GetOptions{})
	must(l, err)
	for _, d := range c.Status.Devices {
		text := d.Driver + "/" + d.Pool + "/" + d.Device
		for _, c := range d.Conditions {
			text += fmt.Sprintf(" %s=%s", c.Type, c.Status)
		}
		if d.NetworkData != nil {
			text += fmt.Sprintf(" %s %s %s", d.NetworkData.InterfaceName, d.NetworkData.IPs, d.NetworkData.HardwareAddress)
		}
		if d.Data != nil {
			text += " " + string(d.Data.Raw)
		}
		list = append(list, text)
	}
	return list
}

func (l *draLab) writes() (n int) {
	for _, a := range l.client.Actions() {
		if a.GetVerb() == "patch" && a.GetSubresource() == "status" {
			n++
		}
	}
	return n
}

// TestStatus: a claim's status has the VFs that pods have, with interface and addresses, and after DEL that no pod has them. Entries of
// other drivers stay, and a restarted daemon does not write the same again.
func TestStatus(t *testing.T) {
	l := newDRALab(t)
	stop := l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf0), deviceResult("b", vf1))
	c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: "other.example.com", Pool: "p", Device: "d"}}
	l.addClaims(c)
	k.prepareClaims(c)
	l.writeJournal(c, vf0, "web-0", "/proc/self/ns/net", "10.0.0.7/24", "fd00::7/64")
	l.writeJournal(c, vf1, "web-0", "/proc/self/ns/net")
	const data = ` {"pciAddress":"0000:11:02.%d","pf":"ens0f0","vf":%d,"vlan":7}`
	const other = "other.example.com/p/d"
	both := []string{other,
		"sriov.podlace.io/node-a/0000-11-02-0 Ready=True net1 [10.0.0.7/24 fd00::7/64] 02:00:00:00:00:01" + fmt.Sprintf(data, 0, 0),
		"sriov.podlace.io/node-a/0000-11-02-1 Ready=True net1 [] 02:00:00:00:00:01" + fmt.Sprintf(data, 1, 1)}
	wait := func(want ...string) {
		t.Helper()
		l.await(fmt.Sprintf("status %q", want), func() bool {
			if got := l.statusTexts("web"); !cmp.Equal(got, want) {
				fmt.Fprintf(l.log, "status is %q\n", got)
				return false
			}
			return true
		})
	}
	wait(both...)
	l.detach(vf0)
	wait(other, `sriov.podlace.io/node-a/0000-11-02-0 Ready=False {"pciAddress":"0000:11:02.0","pf":"ens0f0","vf":0}`, both[2])
	stop()
	before := l.writes()
	l.Driver = New(l.options)
	l.repeatInventory()
	stop = l.runDriver()
	l.register(false)
	time.Sleep(3 * joinStatus)
	if got := l.writes(); got != before {
		t.Errorf("%d writes, then %d", before, got)
	}
	l.detach(vf1)
	wait(other, `sriov.podlace.io/node-a/0000-11-02-0 Ready=False {"pciAddress":"0000:11:02.0","pf":"ens0f0","vf":0}`,
		`sriov.podlace.io/node-a/0000-11-02-1 Ready=False {"pciAddress":"0000:11:02.1","pf":"ens0f0","vf":1}`)
	stop()
}

// TestStatusForbidden: without permission to write the status, pods start, and the daemon logs it once and pauses. After any other
// error it retries, unless the claim was deleted. A failure does not delay other claims.
func TestStatusForbidden(t *testing.T) {
	l := newDRALab(t)
	answers, tries := map[string]error{}, map[string]int{}
	l.client.PrependReactor("patch", "resourceclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		name := a.(clienttesting.PatchAction).GetName()
		tries[name]++
		return answers[name] != nil, nil, answers[name]
	})
	group := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	for uid, c := range map[string]*resourceapi.ResourceClaim{vf0: newClaim("c-1", "web", deviceResult("a", vf0)),
		vf1: newClaim("c-2", "bad", deviceResult("a", vf1)), vf2: newClaim("c-3", "good", deviceResult("a", vf2))} {
		l.addClaims(c)
		_, err := l.prepare(t.Context(), c)
		must(t, err)
		l.writeJournal(c, uid, c.Name+"-0", "/proc/self/ns/net")
		defer l.detach(uid)
	}
	answers["bad"] = apierrors.NewForbidden(group, "bad", errors.New("no"))
	w := newStatusWriter(l.Driver)
	wait := func(uid string) time.Duration { return time.Until(w.next[uid]) }
	answers["web"] = errors.New("too many requests")
	if next := w.writeAll(t.Context()); next > 2*time.Second || tries["web"] != 1 || tries["bad"] != 1 || tries["good"] != 1 {
		t.Errorf("again in %s, tries %v", next, tries)
	}
	w.next["c-1"] = w.next["c-1"].Add(time.Hour) // the machine may be slower than the pause
	if w.writeAll(t.Context()); tries["web"] != 1 || wait("c-2") < statusForbidden/2 {
		t.Errorf("tries at once: %v, forbidden for %s", tries, wait("c-2"))
	}
	answers["web"] = apierrors.NewForbidden(group, "web", errors.New("no"))
	for range 3 {
		delete(w.next, "c-2")
		if w.writeAll(t.Context()); tries["web"] != 1 {
			t.Errorf("tries %v", tries)
		}
	}
	delete(w.next, "c-1")
	w.writeAll(t.Context())
	if n := strings.Count(l.log.String(), "associated-node:patch"); n != 1 || tries["web"] != 2 || tries["bad"] != 4 || tries["good"] != 1 {
		t.Errorf("logged %d times after tries %v\n%s", n, tries, l.log)
	}
	answers["web"] = apierrors.NewNotFound(group, "web")
	for range 2 {
		delete(w.next, "c-1")
		w.writeAll(t.Context())
	}
	if tries["web"] != 3 || wait("c-1") > 0 {
		t.Errorf("tries %v for a claim that was deleted, again in %s", tries, wait("c-1"))
	}
	answers["bad"] = errors.New("too many requests")
	delete(w.next, "c-2")
	w.writeAll(t.Context())
	failed := w.pauses.NumRequeues("c-2")
	must(t, claim.Remove(l.options.Claims, "c-2"))
	if w.writeAll(t.Context()); failed != 1 || w.pauses.NumRequeues("c-2") != 0 {
		t.Errorf("%d failures of a claim, and %d after its end", failed, w.pauses.NumRequeues("c-2"))
	}
}

// TestHealth: in both versions of the API, the kubelet gets reports about prepared devices only, at once after a change and after
// Prepare.
func TestHealth(t *testing.T) {
	for _, v1beta1 := range []bool{false, true} {
		l := newDRALab(t)
		l.runDriver()
		k := l.register(v1beta1)
		reports := k.watchHealth()
		expect := func(want string) {
			t.Helper()
			select {
			case got := <-reports:
				if got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			case <-time.After(patience):
				t.Errorf("no report of %q", want)
			}
		}
		expect("")
		c := newClaim("c-1", "web", deviceResult("a", vf0), deviceResult("a", vf1))
		l.addClaims(c)
		k.prepareClaims(c)
		expect("0000-11-02-0=HEALTHY; 0000-11-02-1=HEALTHY")
		l.setFault(vf0, "PF ens0f0 has no carrier")
		expect("0000-11-02-0=UNHEALTHY PF ens0f0 has no carrier; 0000-11-02-1=HEALTHY")
		l.setFault(vf2, "not prepared")
		expect("0000-11-02-0=HEALTHY; 0000-11-02-1=HEALTHY")
		k.unprepareClaims("c-1")
		expect("")
	}
}
