// SPDX-License-Identifier: Apache-2.0

package podlacepod

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

type object = kerneltest.Object

type program = func(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int

// form is one of the two ways to run a chain: as separate plugins, or as podlace-pod.
type form struct {
	name     string
	programs []program
	confs    []object
}

var mappings = []object{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}

func bothForms(backend string) []form {
	common := object{"cniVersion": "1.1.0", "name": "net", "runtimeConfig": object{
		"portMappings": mappings,
		"bandwidth":    object{"ingressRate": 20_000_000, "egressRate": 10_000_000},
		"ips":          []string{"10.94.0.5/24", "fd00:94::5/64"}}}
	main := []any{"bridge", "ch0", "isGateway", true, "ipMasq", true, "ipMasqBackend", backend, "antiSpoof", true,
		"ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.94.0.0/24"}}, []any{object{"subnet": "fd00:94::/64"}}},
			"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}}}
	capabilities := object{"portMappings": true, "bandwidth": true, "ips": true}
	return []form{
		{"the chain", []program{bridge.Plugin(hostlocal.Plugin()).Run, portmap.Plugin().Run, bandwidth.Plugin().Run}, []object{
			common.With(main...).With("type", "bridge", "capabilities", object{"ips": true}),
			common.With("type", "portmap", "backend", backend, "capabilities", object{"portMappings": true}),
			common.With("type", "bandwidth", "capabilities", object{"bandwidth": true})}},
		{"podlace-pod", []program{Plugin().Run}, []object{common.With(main...).With("type", plugin.PodType, "capabilities", capabilities,
			"portmap", object{"backend": backend}, "bandwidth", object{})}},
	}
}

type lab struct {
	*testing.T
	pod *sandbox.Pod
}

// call runs a verb of each plugin as a runtime does, and returns the result.
func (l lab) call(f form, verb string, prev []byte, keys ...any) []byte {
	l.Helper()
	order := []int{0, 1, 2}[:len(f.programs)]
	if verb == "DEL" {
		slices.Reverse(order)
	}
	for _, i := range order {
		conf := f.confs[i].With(keys...)
		if prev != nil {
			conf = conf.With("prevResult", json.RawMessage(prev))
		}
		one := kerneltest.Lab{T: l.T, Plugin: f.programs[i], Conf: conf, Pod: l.pod}
		if o := one.OK(one.Call(verb, "a")); verb == "ADD" {
			prev = o.Stdout
		}
	}
	return prev
}

func newLab(t *testing.T) (l lab, opt snapshot.Options) {
	t.Helper()
	l = lab{t, kerneltest.NewPod(t)}
	t.Cleanup(func() {
		if link, err := netlink.LinkByName("ch0"); err == nil {
			kerneltest.Must(t, netlink.LinkDel(link))
		}
		kerneltest.Must(t, kerneltest.FlushNFT(), os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni"))
	})
	return l, snapshot.Options{Pods: []*sandbox.Pod{l.pod}, Dirs: kerneltest.StateDirs(),
		Ignore: regexp.MustCompile(`last_reserved_ip|/podlace_boot|address 127\.0\.0\.1/8 dev lo`)}
}

// earlier is the result of a plugin that stands before the chain.
var earlier = []byte(`{"cniVersion": "1.1.0", "interfaces": [{"name": "other0", "mac": "02:00:00:00:00:09"}]}`)

// Both forms return the same result and leave the same state, and either checks, restores and deletes what the other made.
func TestSame(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			l, opt := newLab(t)
			forms := bothForms(backend)
			l.call(forms[0], "DEL", l.call(forms[0], "ADD", nil)) // the first pod makes the state that all pods share
			base, err := snapshot.Take(opt)
			kerneltest.Must(t, err)
			// Each ADD gets another index of the host side, which is in the records and is the group of the links.
			same := opt
			same.Ignore = regexp.MustCompile(opt.Ignore.String() + `|/run/podlace/net/(bridge|bandwidth)-\w+$|host: link (bwp|veth)\w+$`)
			result := string(l.call(forms[0], "ADD", earlier))
			made, err := snapshot.Take(same)
			kerneltest.Must(t, err)
			l.call(forms[0], "DEL", []byte(result))
			for i, by := range forms {
				got := l.call(by, "ADD", earlier)
				if withoutIFB(got) != withoutIFB([]byte(result)) {
					t.Errorf("%s: result\n%s\nof the chain\n%s", by.name, got, result)
				}
				kerneltest.NoLeak(t, made, same)
				other := forms[1-i]
				l.call(other, "CHECK", got)
				kerneltest.Must(t, kerneltest.FlushNFT())
				l.call(other, "STATUS", nil) // restores the rules
				kerneltest.NoLeak(t, made, same)
				time.Sleep(1100 * time.Millisecond) // GC keeps a younger attachment
				l.call(other, "GC", nil, "cni.dev/valid-attachments", []object{})
				kerneltest.NoLeak(t, base, opt)
				l.call(other, "DEL", l.call(by, "ADD", earlier))
				kerneltest.NoLeak(t, base, opt)
			}
		})
	}
}

// withoutIFB leaves out the MAC of the ifb device, which the kernel draws.
func withoutIFB(result []byte) string {
	return regexp.MustCompile(`"mac": "\S+",\s+"mtu": \d+,\s+"name": "bwp`).ReplaceAllString(string(result), `"name": "bwp`)
}

// The error names the failed part, and ADD undoes the parts before it.
func TestFailedPart(t *testing.T) {
	l, opt := newLab(t)
	f := bothForms("nftables")[1]
	l.call(f, "DEL", l.call(f, "ADD", nil))
	base, err := snapshot.Take(opt)
	kerneltest.Must(t, err)
	one := kerneltest.Lab{T: t, Plugin: f.programs[0], Conf: f.confs[0], Pod: l.pod}
	one.Fails(one.Call("ADD", "a", "portmap", object{"backend": "magic"}), plugin.CodeConfig, `podlace-pod (portmap) add: backend "magic"`)
	kerneltest.NoLeak(t, base, opt)
	one.Fails(one.Call("ADD", "a", "portmap", object{"name": "other"}), plugin.CodeConfig, "portmap.name: this key belongs to the whole entry: move it out of portmap")
	one.Fails(one.Call("ADD", "a", "bandwidth", 5), plugin.CodeDecode, "bandwidth: want an object")
	kerneltest.NoLeak(t, base, opt)
	neighbour := kerneltest.Lab{T: t, Plugin: f.programs[0], Pod: kerneltest.NewPod(t),
		Conf: f.confs[0].With("runtimeConfig", object{"portMappings": mappings})}
	first := neighbour.OK(neighbour.Call("ADD", "b"))
	beside, err := snapshot.Take(opt)
	kerneltest.Must(t, err)
	one.Fails(one.Call("ADD", "a"), plugin.CodePortConflict, "podlace-pod (portmap) add: hostPort tcp 8080 is in use by") // after bridge
	kerneltest.NoLeak(t, beside, opt)
	neighbour.OK(neighbour.Call("DEL", "b", "prevResult", json.RawMessage(first.Stdout)))
	kerneltest.NoLeak(t, base, opt)
	o := one.OK(one.Call("ADD", "a", "portmap", object{"backnd": "nftables"}))
	if !strings.Contains(o.Log, "backnd") || strings.Contains(o.Log, `key=portmap`) {
		t.Errorf("log %s", o.Log)
	}
	kerneltest.Must(t, kerneltest.FlushNFT())
	one.Fails(one.Call("CHECK", "a", "prevResult", json.RawMessage(o.Stdout)), plugin.CodeStateDiffers, "are missing; portmap: the rules of")
	l.call(f, "STATUS", nil) // restores the rules
	l.call(f, "DEL", o.Stdout, "bandwidth", 5, "portmap", []int{1})
	kerneltest.NoLeak(t, base, opt)
}

// Bridge gives a pod its address first and releases it last, with the rules gone. DEL and GC also call a part that the configuration does
// not use any more.
func TestOrder(t *testing.T) {
	var got []string
	var c chain
	for _, name := range []string{"bridge", "portmap", "bandwidth"} {
		as := func(what string) func(*plugin.Request) error {
			return func(*plugin.Request) error { got = append(got, what+" "+name); return nil }
		}
		c = append(c, part{Plugin: plugin.Plugin{Name: name, Del: as("DEL"), Check: as("CHECK"), GC: as("GC"), Status: as("STATUS")}})
	}
	for config, used := range map[string][]string{
		`{"name": "net"}`: {"bridge"},
		`{"name": "net", "portmap": {}, "bandwidth": {}}`:            {"bridge", "portmap", "bandwidth"},
		`{"name": "net", "capabilities": {"bandwidth": true}}`:       {"bridge", "bandwidth"},
		`{"name": "net", "capabilities": {"portMappings": false}}`:   {"bridge", "portmap"},
		`{"name": "net", "capabilities": {"ips": true}, "snat": {}}`: {"bridge"},
	} {
		for verb, call := range map[string]func(*plugin.Request) error{"CHECK": c.check, "STATUS": c.status, "GC": c.gc, "DEL": c.del} {
			parts := used
			if verb == "GC" || verb == "DEL" {
				parts = []string{"bandwidth", "portmap", "bridge"}
			}
			var want []string
			for _, name := range parts {
				want = append(want, verb+" "+name)
			}
			got = nil
			err := call(&plugin.Request{Verb: verb, Config: []byte(config), Log: slog.New(slog.DiscardHandler)})
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%s with %s: %v, %q, want %q", verb, config, err, got, want)
			}
		}
	}
}

// A configuration without limits and hostPorts gets no warning about them, like a chain without these plugins, but a capability that is
// switched off beside its section does.
func TestUnusedParts(t *testing.T) {
	l, _ := newLab(t)
	conf := bothForms("nftables")[1].confs[0].With("runtimeConfig", object{}, "capabilities", object{})
	delete(conf, "portmap")
	delete(conf, "bandwidth")
	one := kerneltest.Lab{T: t, Plugin: Plugin().Run, Conf: conf, Pod: l.pod}
	for _, c := range []struct {
		keys []any
		want string
	}{
		{nil, ""},
		{[]any{"portmap", object{}, "capabilities", object{"portMappings": false}}, "no hostPort is forwarded"},
		{[]any{"bandwidth", object{}, "capabilities", object{"bandwidth": nil}}, "no pod is limited"},
	} {
		o := one.OK(one.Call("ADD", "a", c.keys...))
		if c.want == "" && strings.Contains(o.Log, "finding=") || !strings.Contains(o.Log, c.want) {
			t.Errorf("with %v: log %q, want %q", c.keys, o.Log, c.want)
		}
		one.OK(one.Call("CHECK", "a", append(c.keys, "prevResult", json.RawMessage(o.Stdout))...))
		one.OK(one.Call("DEL", "a", c.keys...))
	}
}

// If a part fails, the first part stays, which releases the addresses: a rule of another part may be left.
func TestEnd(t *testing.T) {
	for _, c := range []struct{ verb, fails, want, msg string }{
		{"DEL", "", "DEL limits, DEL ports, DEL main", ""},
		{"DEL", "DEL limits", "DEL limits, DEL ports", "DEL limits"},
		{"DEL", "DEL limits, DEL ports", "DEL limits, DEL ports", "DEL limits; ports: DEL ports"},
		{"DEL", "DEL main", "DEL limits, DEL ports, DEL main", "DEL main"},
		{"ADD", "ADD main", "ADD main", "ADD main"},
		{"ADD", "ADD ports", "ADD main, ADD ports, DEL limits, DEL ports, DEL main", "ADD ports"},
		{"ADD", "ADD ports, DEL ports", "ADD main, ADD ports, DEL limits, DEL ports", "ADD ports\nundo: ports: DEL ports"},
		{"ADD", "ADD limits", "ADD main, ADD ports, ADD limits, DEL limits, DEL ports, DEL main", "ADD limits"},
	} {
		var did []string
		do := func(what string) error {
			did = append(did, what)
			if slices.Contains(strings.Split(c.fails, ", "), what) {
				return plugin.WithHint(errors.New(what), "mend %s", what)
			}
			return nil
		}
		var parts chain
		for _, name := range []string{"main", "ports", "limits"} {
			parts = append(parts, part{plugin.Plugin{Name: name, Del: func(*plugin.Request) error { return do("DEL " + name) },
				Add: func(*plugin.Request) (*types100.Result, error) { return nil, do("ADD " + name) }}, func(*plugin.Request) error { return nil }})
		}
		r := &plugin.Request{Plugin: plugin.PodType, Verb: c.verb, Config: []byte(`{"name": "net", "portmap": {}, "bandwidth": {}}`),
			Log: slog.New(slog.DiscardHandler)}
		var err error
		if c.verb == "ADD" {
			_, err = parts.add(r)
		} else {
			err = parts.del(r)
		}
		if got := strings.Join(did, ", "); got != c.want {
			t.Errorf("%s with %q failing: %s, want %s", c.verb, c.fails, got, c.want)
		}
		if err == nil != (c.msg == "") || err != nil && err.Error() != c.msg {
			t.Errorf("%s with %q failing: error %v, want %q", c.verb, c.fails, err, c.msg)
		}
		if two := "mend DEL ports; mend DEL limits"; c.verb == "DEL" && strings.Contains(c.msg, ";") && plugin.Hint(err) != two {
			t.Errorf("hints %q, want %q", plugin.Hint(err), two)
		}
	}
}
