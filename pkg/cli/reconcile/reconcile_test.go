// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestJudge: only proof that its pod is gone makes an attachment dead.
func TestJudge(t *testing.T) {
	asked := Runtimes{Asked: []string{"crictl"}, Running: map[string]bool{"runs": true}}
	silent := Runtimes{}
	old, young := time.Now().Add(-time.Hour), time.Now().Add(-time.Minute)
	for name, c := range map[string]struct {
		a    Attachment
		rt   Runtimes
		all  bool
		dead string
	}{
		"alive":                           {Attachment{State: Alive}, asked, false, ""},
		"alive, all":                      {Attachment{State: Alive}, silent, true, ""},
		"alive, of an earlier boot":       {Attachment{State: Alive, earlier: true}, asked, true, ""},
		"gone":                            {Attachment{State: Gone, Netns: "/run/netns/x"}, silent, false, "namespace /run/netns/x is gone"},
		"gone, but the container runs":    {Attachment{State: Gone, Netns: "/run/netns/x", ContainerID: "runs"}, asked, true, ""},
		"booted since":                    {Attachment{State: Gone, earlier: true}, silent, false, "made before the node was booted"},
		"booted since, runs":              {Attachment{State: Gone, earlier: true, ContainerID: "runs"}, asked, false, ""},
		"unknown":                         {Attachment{State: Unknown, written: old}, asked, false, "no runtime knows the container"},
		"unknown, no runtime asked":       {Attachment{State: Unknown, written: old}, silent, false, ""},
		"unknown, no runtime asked, all":  {Attachment{State: Unknown, written: old}, silent, true, "no runtime knows the container"},
		"unknown, in the cache of libcni": {Attachment{State: Unknown, written: old, Cached: true}, asked, true, ""},
		"unknown, perhaps in the making":  {Attachment{State: Unknown, written: young}, asked, true, ""},
		"unmounted": {Attachment{State: Unknown, Netns: "/x", written: old, Cached: true}, asked, false,
			"/x is no namespace any more"},
		"unmounted, no runtime asked":      {Attachment{State: Unknown, Netns: "/x", written: old}, silent, false, ""},
		"unmounted, container runs":        {Attachment{State: Unknown, Netns: "/x", ContainerID: "runs"}, asked, true, ""},
		"unmounted, perhaps in the making": {Attachment{State: Unknown, Netns: "/x", written: young}, asked, false, ""},
	} {
		Judge([]*Attachment{&c.a}, c.rt, c.all)
		if c.a.Dead != c.dead {
			t.Errorf("%s: %q, want %q", name, c.a.Dead, c.dead)
		}
	}
}

func TestDoubt(t *testing.T) {
	asked := Runtimes{Asked: []string{"crictl"}}
	dead, kept := &Attachment{Dead: "yes"}, &Attachment{}
	for name, c := range map[string]struct {
		list []*Attachment
		rt   Runtimes
		says string
	}{
		"one of two":          {[]*Attachment{dead, kept}, asked, ""},
		"no runtime asked":    {[]*Attachment{dead, kept}, Runtimes{}, "no runtime could be asked"},
		"none left":           {[]*Attachment{dead, dead}, asked, "nothing would be left"},
		"nothing to do":       {[]*Attachment{kept}, Runtimes{}, ""},
		"nothing on the node": {nil, Runtimes{}, ""},
	} {
		err := Doubt(c.list, c.rt)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

func writeLease(t *testing.T, network, id, netns string) {
	t.Helper()
	stdin := fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q,"type":"x","ipam":{"type":"host-local","subnet":"10.1.2.0/24"}}`, network)
	env := map[string]string{"CNI_COMMAND": "ADD", "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_NETNS": netns, "CNI_PATH": "/"}
	var stdout bytes.Buffer
	if exit := hostlocal.Plugin().Run(func(name string) string { return env[name] }, strings.NewReader(stdin), &stdout,
		io.Discard); exit != 0 {
		t.Fatal(stdout.String())
	}
}

// TestList (F-27) covers records, leases and libcni's cache, and leases from before the last boot.
func TestList(t *testing.T) {
	t.Cleanup(func() {
		for _, dir := range []string{"/run/podlace/n1", "/var/lib/cni"} {
			os.RemoveAll(dir)
		}
	})
	pod := kerneltest.NewPod(t)
	att, err := attachment.Open(&plugin.Request{Plugin: "bridge", Network: "n1", ContainerID: "a", IfName: "eth0", NetnsPath: pod.Path,
		Pod: plugin.Pod{Namespace: "shop", Name: "web-0"}, Log: slog.Default()})
	if err != nil {
		t.Fatal(err)
	}
	if err := att.Save(map[string]any{"addresses": []string{"10.1.2.2/24"}}); err != nil {
		t.Fatal(err)
	}
	att.Close()
	writeLease(t, "n1", "a", pod.Path)
	writeLease(t, "n1", "gone", "/run/netns/none")
	writeLease(t, "n2", "before", "/run/netns/before")
	write(t, "/var/lib/cni/networks/n1/10.1.2.9", "foreign\r\neth0")
	write(t, "/var/lib/cni/networks/n1/10.1.2.8", "bare")
	write(t, "/var/lib/cni/results/n1-foreign-eth0", `{"kind":"cniCacheV1","containerId":"foreign","ifName":"eth0","networkName":"n1",
		"netns":"/run/netns/foreign","cniArgs":[["IgnoreUnknown","1"],["K8S_POD_NAMESPACE","shop"],["K8S_POD_NAME","db-0"]]}`)
	write(t, "/var/lib/cni/results/n1-torn-eth0", "{")
	write(t, "/var/lib/cni/networks/n2/podlace_boot", "earlier 0\n")
	longAgo := time.Now().AddDate(-10, 0, 0) // the machine has really been booted later
	kerneltest.Must(t, os.Chtimes("/var/lib/cni/networks/n2/10.1.2.2", longAgo, longAgo))
	kerneltest.Must(t, os.RemoveAll("/run/podlace/n2"))
	before, _ := filepath.Glob("/var/lib/cni/networks/*/*")
	list, err := List(nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, a := range list {
		got = append(got, fmt.Sprint(a.Network, " ", a.Pod, " ", a.ContainerID, "/", a.IfName, " ", a.Addresses, " ", a.Holders, " ", a.State,
			" ", a.earlier, a.Cached))
	}
	slices.Sort(got)
	want := []string{
		"n1  bare/ [10.1.2.8] [host-local] unknown false false",
		"n1  gone/eth0 [10.1.2.3] [host-local] gone false false",
		"n1 shop/db-0 foreign/eth0 [10.1.2.9] [host-local] gone false true",
		"n1 shop/web-0 a/eth0 [10.1.2.2] [bridge host-local] alive false false",
		"n2  before/eth0 [10.1.2.2] [host-local] gone true false",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if after, _ := filepath.Glob("/var/lib/cni/networks/*/*"); !slices.Equal(before, after) {
		t.Errorf("looking changed the folder: %q, now %q", before, after)
	}
}

func TestNetworks(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"10-a.conflist":      `{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"bridge","ipam":{"type":"host-local","dataDir":"/x"}},{"type":"portmap"}]}`,
		"20-b.conf":          `{"cniVersion":"1.1.0","name":"b","type":"macvlan","disableGC":true}`, // libcni has the key only in lists,
		"30-c.conflist":      `{"cniVersion":"1.1.0","name":"c","plugins":[{"type":"bridge"}]}`,
		"c/1.conf":           `{"type":"tuning"}`,
		"35-d.conflist":      `{"cniVersions":["0.4.0","1.0.0"],"name":"d","disableGC":"True","plugins":[{"type":"x"}]}`,
		"36-e.conflist":      `{"name":"e","disableGC":"false","disablegc":true,"plugins":[{"type":"x"}]}`,
		"37-f.conflist":      `{"name":"f"}`,
		"f/1.conf":           `{"type":"bridge"}`,
		"38-g.conflist":      `{"name":"g","type":"bridge"}`,
		"39-h.conf":          `{"name":"h","plugins":[{"type":"bridge"}]}`,
		"40-a.json":          `{"name":"a","type":"bridge"}`,
		"50-bad.json":        `{"name":"a"`,
		"60-none.conflist":   `{"name":"none","plugins":[]}`,
		"70-path.conflist":   `{"name":"path","plugins":[{"type":"../sh"}]}`,
		"80-noname.conflist": `{"plugins":[{"type":"bridge"}]}`,
		"90-old.bak":         `{}`,
	} {
		write(t, filepath.Join(dir, name), content)
	}
	networks, notes, err := Networks(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range networks {
		text := fmt.Sprint(n.Name, " ", n.gcVersion(), " ", n.DisableGC)
		for _, p := range n.Plugins {
			text += " " + p.Type + "," + p.IPAM + p.dataDir
		}
		got = append(got, text)
	}
	if diff := cmp.Diff([]string{"a 1.1.0 false bridge,host-local/x portmap,", "b 1.1.0 false macvlan,", "c 1.1.0 false bridge, tuning,",
		"d 1.1.0 true x,", "e 1.1.0 false x,", "f 1.1.0 false bridge,"},
		got); diff != "" {
		t.Error(diff)
	}
	for i, says := range []string{"38-g.conflist: it has no name, or no list", "39-h.conf: error parsing configuration: missing 'type'",
		"10-a.conflist already", "50-bad.json", "no plugins", `type "../sh": want`, "no name"} {
		if len(notes) != 7 || !strings.Contains(notes[i], says) {
			t.Fatalf("notes %q, want one with %q", notes, says)
		}
	}
	if _, _, err := Networks(filepath.Join(dir, "missing")); err == nil {
		t.Error("a folder that is not there counts as empty")
	}
}

func TestAskRuntimes(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if rt := AskRuntimes(); len(rt.Asked) != 0 || len(rt.Notes) != 0 {
		t.Errorf("there is no runtime, got %+v", rt)
	}
	for _, answer := range []string{"echo connection refused >&2; exit 1", "echo 'no JSON'", "echo '{}'"} {
		script(t, filepath.Join(dir, "crictl"), answer)
		if rt := AskRuntimes(); len(rt.Asked) != 0 || len(rt.Notes) != 1 {
			t.Errorf("%s: %+v", answer, rt)
		}
	}
	script(t, filepath.Join(dir, "crictl"), `[ "$*" = "pods -o json" ] && echo '{"items":[
		{"id":"ready","state":"SANDBOX_READY","metadata":{"name":"web-0","namespace":"shop"}},{"id":"stopped","state":"SANDBOX_NOTREADY"}]}'`)
	for i, folder := range taskFolders() {
		path := folder + "/k8s.io/" + fmt.Sprint("task", i)
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(folder) })
	}
	rt := AskRuntimes()
	if diff := cmp.Diff(map[string]bool{"ready": true, "task0": true, "task1": true}, rt.Running); diff != "" || len(rt.Asked) != 3 {
		t.Errorf("%q\n%s", rt.Asked, diff)
	}
	list := []*Attachment{{ContainerID: "ready"}, {ContainerID: "stopped", Pod: "a/b"}}
	Judge(list, rt, false)
	if list[0].Pod != "shop/web-0" || list[1].Pod != "a/b" {
		t.Errorf("pods %s and %s", list[0].Pod, list[1].Pod)
	}
}

func script(t *testing.T, path, text string) {
	t.Helper()
	write(t, path, "#!/bin/sh\n"+text+"\n")
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

// TestCollect: each plugin of Podlace gets the valid and the dead attachments, those of other projects are not called, and the errors of
// all are returned.
func TestCollect(t *testing.T) {
	dir := t.TempDir()
	keep := `[ -z "$CNI_COMMAND" ] && { echo "CNI plugin of Podlace x" >&2; exit; }
cat > "$0.$CNI_COMMAND."; env > "$0.env"; `
	script(t, filepath.Join(dir, "bridge"), keep+`echo '{"code":5,"msg":"bridge gc: cannot"}'; exit 1`)
	script(t, filepath.Join(dir, "portmap"), keep+`echo why >&2; exit 3`)
	script(t, filepath.Join(dir, "host-local"), keep)
	script(t, filepath.Join(dir, "foreign"), `touch "$0.$CNI_COMMAND"`)
	conf := filepath.Join(t.TempDir(), "net.d")
	write(t, conf+"/1.conflist", `{"cniVersion":"0.4.0","name":"n","plugins":[{"type":"bridge","n":123456789012345},{"type":"foreign"},
		{"type":"missing"},{"type":"portmap"},{"type":"foreign","ipam":{"type":"host-local"}}]}`)
	networks, _, err := Networks(conf)
	if err != nil {
		t.Fatal(err)
	}
	plan := NewPlan(networks[0], nil, dir)
	if len(plan.Run) != 3 || len(plan.Notes) != 3 || !strings.Contains(plan.Notes[0], "foreign is left alone: it is not Podlace's") ||
		!strings.Contains(plan.Notes[1], "missing: no such file or directory: --bin-dir names the folder") ||
		!strings.Contains(plan.Notes[2], "host-local's, which runs") {
		t.Errorf("runs %v, notes %q", plan.Run, plan.Notes)
	}
	list := []*Attachment{{Network: "n", ContainerID: "a", IfName: "eth0"}, {Network: "n", ContainerID: "b", IfName: "eth0", Dead: "yes"},
		{Network: "n", ContainerID: "old"}, {Network: "other", ContainerID: "c", IfName: "eth0", Dead: "yes"}}
	if err := plan.Collect(list[:1]); err != nil {
		t.Errorf("no attachment is dead: %v", err)
	}
	err = plan.Collect(list)
	for _, says := range []string{"network n: bridge: code 5: bridge gc: cannot", "network n: portmap: exit status 3: why"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: want %q", err, says)
		}
	}
	const valid = `[{"containerID":"a","ifname":"eth0"},{"containerID":"old","ifname":"eth0"}]`
	for _, name := range []string{"bridge", "portmap", "host-local"} {
		var got map[string]json.RawMessage
		data, err := os.ReadFile(filepath.Join(dir, name+".GC."))
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		for key, want := range map[string]string{"cniVersion": `"1.1.0"`, "name": `"n"`, "cni.dev/valid-attachments": valid,
			"cni.dev/attachments":      valid,
			"podlace/dead-attachments": `[{"containerID":"b","ifname":"eth0"}]`} {
			if string(got[key]) != want || err != nil {
				t.Errorf("%s got %s for %s, want %s", name, got[key], key, want)
			}
		}
		env, _ := os.ReadFile(filepath.Join(dir, name+".env"))
		if !strings.Contains(string(env), "CNI_PATH="+dir+"\n") || strings.Contains(string(env), "CNI_CONTAINERID") {
			t.Errorf("%s ran with %s", name, env)
		}
	}
	if data, _ := os.ReadFile(filepath.Join(dir, "bridge.GC.")); !strings.Contains(string(data), "123456789012345") {
		t.Errorf("a number lost digits: %s", data)
	}
	if _, err := os.Stat(filepath.Join(dir, "foreign.GC")); err == nil {
		t.Error("GC of a foreign plugin ran")
	}
	if plan := NewPlan(Network{Name: "n", DisableGC: true, Plugins: networks[0].Plugins}, nil, dir); len(plan.Run) != 0 ||
		len(plan.Notes) != 1 {
		t.Errorf("disableGC: runs %v, notes %q", plan.Run, plan.Notes)
	}
}

// TestPlanByRecords: GC of a plugin with state of dead attachments is called even if no configuration names it.
func TestPlanByRecords(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"bridge", "portmap", "host-local"} {
		script(t, filepath.Join(dir, name), `echo "CNI plugin of Podlace x" >&2`)
	}
	bridge := Plugin{Type: "bridge", IPAM: hostLocal, raw: json.RawMessage(`{}`)}
	list := []*Attachment{{Network: "n", Dead: "yes", Holders: []string{"bridge", "host-local", "portmap"}},
		{Network: "n", Holders: []string{"bandwidth"}},
		{Network: "m", Dead: "yes", Holders: []string{"tuning"}}, {Network: "o", Dead: "yes", Holders: []string{"../../bin/sh"}}}
	podOnly := t.TempDir()
	script(t, filepath.Join(podOnly, plugin.PodType), `echo "CNI plugin of Podlace x" >&2`)
	leases := []*Attachment{{Network: "n", Dead: "yes", Holders: []string{"host-local"}}} // as after a reboot
	for _, of := range [][]*Attachment{list, leases} {
		if plan := NewPlan(Network{Name: "n"}, of, podOnly); len(plan.Run) != 1 || plan.Run[0].Type != plugin.PodType || plan.Notes != nil {
			t.Errorf("only podlace-pod is installed: %+v", plan)
		}
	}
	for name, c := range map[string]struct {
		network Network
		want    string
		notes   int
	}{
		"one is not configured":  {Network{Name: "n", Plugins: []Plugin{bridge}}, "bridge portmap", 0},
		"no configuration":       {Network{Name: "n"}, "bridge portmap", 0},
		"not there":              {Network{Name: "m"}, "", 1},
		"not the name of a file": {Network{Name: "o"}, "", 1},
	} {
		plan := NewPlan(c.network, list, dir)
		var got []string
		for _, p := range plan.Run {
			got = append(got, p.Type)
		}
		if strings.Join(got, " ") != c.want || len(plan.Notes) != c.notes {
			t.Errorf("%s: runs %q, notes %q", name, got, plan.Notes)
		}
	}
}

func TestCompare(t *testing.T) {
	before := []*Attachment{{ContainerID: "a", Dead: "yes"}, {ContainerID: "b", Dead: "yes"}, {ContainerID: "c"}}
	if left := Compare(before, before[1:]); left != 1 || !*before[0].Removed || *before[1].Removed || before[2].Removed != nil {
		t.Errorf("%d left, %+v", left, before)
	}
}
