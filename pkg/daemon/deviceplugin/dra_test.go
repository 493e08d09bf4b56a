// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/poddevices"
)

// recordingDriver is a DRA driver that records its calls.
type recordingDriver struct {
	options dra.Options
	mu      sync.Mutex
	latest  dra.Inventory
	updates int
	unready string
	follows bool // another instance leads
}

func (r *recordingDriver) Run(ctx context.Context) { <-ctx.Done() }

func (r *recordingDriver) Leads() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.follows
}

func (r *recordingDriver) Update(i dra.Inventory) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latest, r.updates = i, r.updates+1
}

func (r *recordingDriver) Ready() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unready
}

func (r *recordingDriver) Published() map[string]poddevices.Published {
	return map[string]poddevices.Published{vf00: {Pool: "node", Device: "0000-11-02-0"}}
}

// formatInventory formats the latest inventory, the pools and devices with faults and owners, such as "one: 0000:11:02.0
// 0000:11:02.1(pod shop/web-0)".
func (r *recordingDriver) formatInventory() (dra.Inventory, string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, p := range r.latest.Pools {
		text := strings.TrimPrefix(p.Name, "example.com/") + ":"
		for _, d := range p.Devices {
			id := d.Address.String()
			text += " " + id
			if holder := r.latest.Held[id]; holder != "" {
				text += "(" + holder + ")"
			}
			if kind := r.latest.Faults[id].Kind; kind != "" {
				text += "!" + kind
			}
		}
		out = append(out, text)
	}
	return r.latest, strings.Join(out, ", ")
}

// useRecorder gives the daemon a recordingDriver and an API server that never answers.
func (l *testLab) useRecorder() *recordingDriver {
	r := &recordingDriver{}
	l.Kubeconfig = l.kubeconfig()
	l.NewDriver = func(o dra.Options) claimDriver {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.options = o
		return r
	}
	return r
}

func (l *testLab) kubeconfig() string {
	path := filepath.Join(l.Root, "kubeconfig")
	write(l.T, path, `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c"}}],
"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}]}`)
	return path
}

func (l *testLab) awaitInventory(r *recordingDriver, want string) {
	l.Helper()
	got := ""
	for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if _, got = r.formatInventory(); got == want {
			return
		}
	}
	l.Fatalf("want %q, got %q\n%s", want, got, l.log)
}

// twoResources returns a configuration with two resources, the first with the given API.
func twoResources(api string) string {
	return `{"resourceList": [{"resourceName": "one", "api": "` + api + `", "selectors": {"pfNames": ["ens0f0"]}},
  {"resourceName": "two", "selectors": {"pfNames": ["ens1f0"]}}]}`
}

// TestSplitByAPI checks that each resource is offered through its API, and that health and metrics include both APIs.
func TestSplitByAPI(t *testing.T) {
	sysfs := twoPFs(t)
	l := prepareLab(t, sysfs, twoResources("dra"))
	r := l.useRecorder()
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/two", vf10, vf11)
	l.awaitInventory(r, "one: "+vf00+" "+vf01)
	l.await("/readyz", "ok")
	l.await("/metrics", `podlace_sriov_devices{numa="0",resource="example.com/one",state="free"} 2`, `resource="example.com/two",state="free"} 2`)
	i, _ := r.formatInventory()
	if !slices.Equal(i.Nodes, []int{0, 1}) || i.Taints.Gone != "NoExecute" || len(i.Last) == 0 || r.options.Node != "node-a" {
		t.Errorf("%+v", i)
	}
	pcitest.Set(t, sysfs, pf0, "net/ens0f0/carrier", "0")
	l.awaitInventory(r, "one: "+vf00+"!link-down "+vf01+"!link-down")
	if a, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{}); err != nil || len(a.Faults) != 2 {
		t.Errorf("%+v, %v", a, err)
	}
	l.kubelet.mu.Lock()
	_, ok := l.kubelet.plugins["example.com/one"]
	l.kubelet.mu.Unlock()
	if ok {
		t.Error("a resource is given out by both APIs")
	}
	r.mu.Lock()
	r.unready = "the kubelet does not know sriov.podlace.io"
	r.mu.Unlock()
	l.await("/readyz", "claims: the kubelet does not know sriov.podlace.io")
}

// TestDRAStartsOnReload checks that API client and driver start when a reload brings the first resource with the API DRA.
func TestDRAStartsOnReload(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("device-plugin"))
	r := l.useRecorder()
	kubeconfig := l.Kubeconfig
	if err := os.Rename(kubeconfig, kubeconfig+".later"); err != nil {
		t.Fatal(err)
	}
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/one", vf00, vf01)
	l.await("/readyz", "ok")
	l.configure(twoResources("dra"))
	l.awaitLog("no access to the API server", "kubeconfig")
	l.await("/readyz", "claims: ", "kubeconfig")
	l.awaitDevices("example.com/two", vf10, vf11)
	if r.updates > 0 || strings.Count(l.log.String(), "no access to the API server") != 1 {
		t.Errorf("%d updates\n%s", r.updates, l.log)
	}
	if err := os.Rename(kubeconfig+".later", kubeconfig); err != nil {
		t.Fatal(err)
	}
	l.hup()
	l.awaitInventory(r, "one: "+vf00+" "+vf01)
	l.await("/readyz", "ok")
}

// TestClaimsFolder checks that each node has the folder of claim records if any node's resource has the API DRA. Without it, plugin
// sriov would refuse all pods of a node without a resource or without access to the API server.
func TestClaimsFolder(t *testing.T) {
	elsewhere := func(api string) string {
		return `{"resourceList": [{"resourceName": "one", "api": "` + api + `", "hosts": ["other-*"]}]}`
	}
	for _, test := range []struct {
		config string
		want   bool
	}{{elsewhere("device-plugin"), false}, {twoResources("dra"), true}, {elsewhere("dra"), true}} {
		l := prepareLab(t, twoPFs(t), test.config)
		l.kubelet.start()
		l.start() // without access to an API server
		l.await("/healthz", "ok")
		if !test.want {
			l.awaitLog("the configuration has no resource for this node")
		}
		for end := time.Now().Add(maxWait); test.want && !claim.InUse(l.Claims) && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		if claim.InUse(l.Claims) != test.want {
			t.Errorf("%s: the folder exists: %v\n%s", test.config, !test.want, l.log)
		}
	}
}

// TestMigrate changes the API of a resource to DRA and back while pods have its devices. They stay listed in the API through which the
// pod got them, and the other one must not assign them to a second pod.
func TestMigrate(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("device-plugin"))
	r := l.useRecorder()
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/one", vf00, vf01)
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/one", vf00)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+vf00)
	l.configure(twoResources("dra"))
	l.awaitDevices("example.com/one", vf00+"!")
	l.kubelet.await("example.com/one", "without PreStartContainer", func(p *registeredPlugin) bool { return !p.options.PreStartRequired })
	l.awaitInventory(r, "one: "+vf00+"(pod shop/web-0) "+vf01)
	if why := r.options.InUse(vf00); !strings.Contains(why, "belongs to pod shop/web-0") {
		t.Errorf("InUse: %q", why)
	}
	l.writeClaim("example.com/one", vf01, false)
	r.options.Changed()
	l.kubelet.release()
	l.hup()
	l.awaitLog("the resource is no longer served", "example.com/one") // the claim does not keep the resource
	l.awaitInventory(r, "one: "+vf00+" "+vf01)
	l.configure(twoResources("device-plugin"))
	l.awaitDevices("example.com/one", vf00, vf01+"!")
	l.kubelet.await("example.com/one", "with PreStartContainer", func(p *registeredPlugin) bool { return p.options.PreStartRequired })
	l.awaitInventory(r, "") // the driver keeps running, because the claim is still prepared
	l.await("/metrics", `podlace_sriov_devices{numa="0",resource="example.com/one",state="allocated"} 1`,
		`podlace_sriov_devices{numa="0",resource="example.com/one",state="free"} 1`)
	if text, err := l.get("/metrics"); err != nil || strings.Contains(text, `state="unhealthy"`) {
		t.Errorf("%v: the device of a claim counts as unhealthy:\n%s", err, text)
	}
	if err := claim.Remove(l.Claims, "c-0"); err != nil {
		t.Fatal(err)
	}
	r.options.Changed()
	l.awaitDevices("example.com/one", vf00, vf01)
}

// TestLeftClaims checks that the driver also starts for claims of an earlier configuration, which the kubelet could not unprepare
// without it.
func TestLeftClaims(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("device-plugin"))
	r := l.useRecorder()
	l.writeClaim("example.com/one", vf00, false)
	l.kubelet.start()
	l.start()
	l.awaitDevices("example.com/one", vf00+"!", vf01)
	for until := time.Now().Add(maxWait); ; time.Sleep(5 * time.Millisecond) {
		r.mu.Lock()
		n := r.updates
		r.mu.Unlock()
		if n > 0 {
			break
		}
		if time.Now().After(until) {
			t.Fatal("no driver")
		}
	}
}

// TestDriverOfClaims checks that each free VF gets its resource's driver before a claim needs it, and that a claimed VF keeps, and is
// healthy with, the driver that the claim chose. A free VF is faulty if its interface is in another namespace.
func TestDriverOfClaims(t *testing.T) {
	sysfs := twoPFs(t)
	pcitest.Kernel{}.Start(t, sysfs)
	l := prepareLab(t, sysfs, `{"resourceList": [{"resourceName": "one", "api": "dra", "driver": "vfio-pci", "selectors": {"pfNames": ["ens0f0"]}},
  {"resourceName": "two", "api": "dra", "selectors": {"pfNames": ["ens1f0"]}}]}`)
	r := l.useRecorder()
	l.writeClaim("example.com/one", vf00, false)
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-9", "app", "example.com/other", "")
	l.start()
	l.awaitLog("changed the driver of a device", vf01, "vfio-pci")
	l.awaitInventory(r, "one: "+vf00+" "+vf01+", two: "+vf10+" "+vf11)
	if driver := driverOf(t, sysfs, vf00); driver != "iavf" {
		t.Errorf("driver of a VF that a claim has: %s", driver)
	}
	if why := r.options.InUse(vf00); why != "" {
		t.Errorf("InUse looks at claims: %s", why)
	}
	if err := os.RemoveAll(filepath.Join(pcitest.Folder(t, sysfs, vf10), "net")); err != nil {
		t.Fatal(err)
	}
	l.awaitInventory(r, "one: "+vf00+" "+vf01+", two: "+vf10+"!held "+vf11)
	if why := r.options.InUse(vf10); why != "has its interface in another namespace" {
		t.Errorf("InUse: %q", why)
	}
	for id, says := range map[string]string{"x": "does not exist", "0000:99:01.0": "does not exist", vf11: ""} {
		if why := r.options.InUse(id); !strings.Contains(why, says) || (why == "") != (says == "") {
			t.Errorf("InUse of %s: %q", id, why)
		}
	}
	err := r.options.Change([]string{vf11}, func() error { return errors.New(r.options.InUse(vf10)) },
		func() error { t.Error("changed"); return nil })
	if err == nil {
		t.Error("a device in use was changed")
	}
}

// TestDRAHarmsNothing checks that the device plugin API works while the real driver cannot reach the API server.
func TestDRAHarmsNothing(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("dra"))
	l.Kubeconfig = l.kubeconfig()
	l.kubelet.start()
	l.start()
	l.awaitLog("a request failed; retrying", "get node")
	p := l.awaitDevices("example.com/two", vf10, vf11)
	if _, err := p.client.Allocate(t.Context(), allocating(vf10)); err != nil {
		t.Fatal(err)
	}
	l.await("/metrics", "podlace_sriov_dra_up 0")
	start := time.Now()
	for i := range 20 {
		l.configure(strings.Replace(twoResources("dra"), "{", fmt.Sprintf("{%*s", i, ""), 1))
		l.hup()
	}
	if took := time.Since(start); took > maxWait {
		t.Errorf("20 reloads took %s", took)
	}
}

// TestSplit checks that byAPI keeps the order of the pools, and that a pod without a known name is shown by its UID.
func TestSplit(t *testing.T) {
	if plain, claimed := byAPI(nil); plain != nil || claimed != nil {
		t.Error(plain, claimed)
	}
	for want, h := range map[string]poddevices.Device{"pod shop/web-0": {Namespace: "shop", Pod: "web-0"}, "pod uid u-0": {Pod: "uid u-0"}} {
		if got := podText(h); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if got := faultTexts(map[string]dra.Fault{"a": {Kind: "k", Text: "t"}}); !maps.Equal(got, map[string]string{"a": "t"}) {
		t.Error(got)
	}
}

// TestAnswerPublished checks that the answer includes the ResourceSlice data if the client asks for it.
func TestAnswerPublished(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("dra"))
	r := l.useRecorder()
	l.kubelet.start()
	l.start()
	l.awaitInventory(r, "one: "+vf00+" "+vf01)
	for asked, want := range map[bool]int{true: 1, false: 0} {
		got, err := poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{Published: asked})
		if err != nil || len(got.Published) != want {
			t.Errorf("asked %v: %v, %v", asked, got.Published, err)
		}
	}
}

// TestAPIRate checks that the rate limit delays neither the claims of 50 pods that start at once nor the writes of claim status.
func TestAPIRate(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoResources("dra"))
	client, err := daemonOptions{Kubeconfig: l.kubeconfig()}.newClient()
	if err != nil {
		t.Fatal(err)
	}
	limiter := client.ResourceV1().RESTClient().GetRateLimiter()
	for i := range 100 {
		if !limiter.TryAccept() {
			t.Fatalf("request %d of 100 has to wait; then %g requests a second", i+1, limiter.QPS())
		}
	}
	if limiter.QPS() < 50 {
		t.Errorf("%g requests a second", limiter.QPS())
	}
}
