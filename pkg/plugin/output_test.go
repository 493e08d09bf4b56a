// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

func ipnet(s string) net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return net.IPNet{IP: ip, Mask: n.Mask}
}

// fullResult returns a result with all fields, also those that exist only in version 1.1.0.
func fullResult() *types100.Result {
	table := 100
	return &types100.Result{
		Interfaces: []*types100.Interface{{Name: "eth0", Mac: "02:00:00:00:00:01", Mtu: 1400, Sandbox: "/x", SocketPath: "/s",
			PciID: "0000:01:00.0"}},
		IPs: []*types100.IPConfig{
			{Interface: types100.Int(0), Address: ipnet("10.1.0.5/24"), Gateway: net.ParseIP("10.1.0.1")},
			{Interface: types100.Int(0), Address: ipnet("fd00::5/64"), Gateway: net.ParseIP("fd00::1")},
		},
		Routes: []*types.Route{{Dst: ipnet("0.0.0.0/0"), GW: net.ParseIP("10.1.0.1"), MTU: 1300, Priority: 5, Table: &table}},
		DNS:    types.DNS{Nameservers: []string{"10.1.0.53"}},
	}
}

func TestEncodeResult(t *testing.T) {
	const (
		iface   = `"interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","sandbox":"/x"}],`
		iface11 = `"interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","mtu":1400,"sandbox":"/x","socketPath":"/s","pciID":"0000:01:00.0"}],`
		four    = `"interface":0,"address":"10.1.0.5/24","gateway":"10.1.0.1"}`
		six     = `"interface":0,"address":"fd00::5/64","gateway":"fd00::1"}`
		old     = `"ip4":{"ip":"10.1.0.5/24","gateway":"10.1.0.1","routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1"}]},"ip6":{"ip":"fd00::5/64","gateway":"fd00::1"},`
		mid     = iface + `"ips":[{"version":"4",` + four + `,{"version":"6",` + six + `],`
		now     = `"ips":[{` + four + `,{` + six + `],`
		route   = `"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1"}],`
		route11 = `"routes":[{"dst":"0.0.0.0/0","gw":"10.1.0.1","mtu":1300,"priority":5,"table":100}],`
		dns     = `"dns":{"nameservers":["10.1.0.53"]}}`
	)
	for v, want := range map[string]string{
		"0.1.0": old, "0.2.0": old, "0.3.0": mid + route, "0.3.1": mid + route, "0.4.0": mid + route,
		"1.0.0": iface + now + route, "1.1.0": iface11 + now + route11,
	} {
		out, err := encodeResult(fullResult(), v)
		if err != nil {
			t.Errorf("%s: %v", v, err)
			continue
		}
		want = `{"cniVersion":"` + v + `",` + want + dns
		if diff := cmp.Diff(decoded(t, want), decoded(t, string(out))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", v, diff)
		}
	}
}

func decoded(t *testing.T, doc string) (v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(doc), &v); err != nil {
		t.Fatalf("%v in %s", err, doc)
	}
	return v
}

// For a nil result, ADD returns prevResult, if necessary converted to the version of the configuration.
func TestPassedOn(t *testing.T) {
	pod := kerneltest.NewPod(t)
	p := Plugin{Name: "x", Add: func(*Request) (*types100.Result, error) { return nil, nil }}
	same := `{"cniVersion":"1.1.0", "ips":[{"address":"10.1.0.5/24"}], "later":7}`
	for prev, want := range map[string]string{
		same:                                  same,
		`{"ips":[{"address":"10.1.0.5/24"}]}`: `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.5/24"}]}`,
		`{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.0.5/24"}]}`: `{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.5/24"}]}`,
	} {
		o := run(p, newEnv("ADD").with("CNI_NETNS", pod.Path), config(`"prevResult":`+prev))
		if o.exit != 0 || prev == same && o.stdout != same {
			t.Fatalf("%s: %d, %s", prev, o.exit, o.stdout)
		}
		if diff := cmp.Diff(decoded(t, want), decoded(t, o.stdout)); diff != "" {
			t.Errorf("%s:\n%s", prev, diff)
		}
	}
	deleted := 0
	p.Del = func(*Request) error { deleted++; return nil }
	if run(p, newEnv("ADD").with("CNI_NETNS", pod.Path), config("")).mustFail(t, CodeInternal); deleted != 1 {
		t.Errorf("without a prevResult: deleted %d times", deleted)
	}
}

// If the configuration's CNI version cannot represent the result, ADD fails and undoes its changes.
func TestInexpressibleResult(t *testing.T) {
	pod := kerneltest.NewPod(t)
	deleted := 0
	p := Plugin{Name: "x",
		Add: func(*Request) (*types100.Result, error) { return &types100.Result{}, nil },
		Del: func(*Request) error { deleted++; return errors.New("del failed") }}
	o := run(p, newEnv("ADD").with("CNI_NETNS", pod.Path), `{"cniVersion":"0.2.0","name":"net"}`)
	if f := o.mustFail(t, CodeVersion); deleted != 1 || !strings.Contains(f.Msg, "0.2.0") || !strings.Contains(f.Msg, "undo: del failed") {
		t.Errorf("deleted %d times, %+v", deleted, f)
	}
}

func failing(err error) Plugin {
	fail := func(*Request) error { return err }
	return Plugin{Name: "x", Del: fail, GC: fail, Status: fail}
}

func TestErrorDocument(t *testing.T) {
	e := newEnv("DEL").with("CNI_NETNS", "/run/netns/gone", "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0")
	err := WithHint(Errorf(CodePortConflict, "hostPort %d is taken", 80), "stop it")
	got := run(failing(err), e, `{"cniVersion":"0.4.0","name":"net"}`).mustFail(t, CodePortConflict)
	want := errorDocument{"0.4.0", CodePortConflict, "x del: hostPort 80 is taken",
		"pod=shop/web-0 container=pod-1 ifname=eth0 netns=/run/netns/gone network=net; stop it"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestErrorDocumentIsPrintable(t *testing.T) {
	raw := "a\nb\x1b[31m\x00\u202eé\xff" + strings.Repeat("x", 5000)
	e := newEnv("DEL").with("CNI_NETNS", raw, "CNI_ARGS", "K8S_POD_NAMESPACE="+raw+";K8S_POD_NAME=\n{}"+raw)
	f := run(failing(errors.New(raw)), e, config("")).mustFail(t, CodeIO)
	if strings.ContainsFunc(f.Msg+f.Details, unprintable) || len(f.Msg) > 1000 || len(f.Details) > 2000 {
		t.Errorf("got %d and %d bytes: %+v", len(f.Msg), len(f.Details), f)
	}
	if !strings.HasPrefix(f.Msg, "x del: a; b?[31m???") {
		t.Errorf("got %.40q", f.Msg)
	}
}

// The error document of DEL contains none of the phrases for which go-cni ignores an error.
func TestDelIsNotReadAsSuccess(t *testing.T) {
	e := newEnv("DEL").with("CNI_NETNS", "/run/not found", "CNI_ARGS", "K8S_POD_NAMESPACE=not found;K8S_POD_NAME=no such file or directory")
	for _, text := range []string{"Link not found", "no such file or directory", "open x: no such file or directory: not found",
		"no such file", strings.Repeat("x", 890) + "not found", "not\nfound", "no such\nfile or directory"} {
		f := run(failing(WithHint(errors.New(text), "%s", text)), e, config("")).mustFail(t, CodeIO)
		if all := f.Msg + f.Details; strings.Contains(all, "not found") || strings.Contains(all, "no such file") {
			t.Errorf("%q: got %+v", text, f)
		}
	}
	if f := run(failing(errors.New("link not found")), environ{"CNI_COMMAND": "GC", "CNI_PATH": "/"},
		config(`"cni.dev/valid-attachments":[]`)).mustFail(t, CodeIO); !strings.Contains(f.Msg, "not found") || f.Details != "network=net" {
		t.Errorf("GC: %+v", f)
	}
}

func TestVersionVerb(t *testing.T) {
	const all = `["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]`
	for stdin, want := range map[string]string{
		`{"cniVersion":"0.3.1"}`: "0.3.1", "": "1.1.0", "garbage": "1.1.0", `{"cniVersion":7}`: "1.1.0",
		`{"cniVersion":"` + strings.Repeat("x", 40) + `"}`: "1.1.0",
	} {
		run(Plugin{Name: "x"}, environ{"CNI_COMMAND": "VERSION"}, stdin).mustSucceed(t, `{"cniVersion":"`+want+`","supportedVersions":`+all+"}\n")
	}
	o := run(Plugin{Name: "x", MinVersion: "0.4.0"}, environ{"CNI_COMMAND": "VERSION"}, "")
	o.mustSucceed(t, `{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}`+"\n")
}

// brokenStream fails every read and write.
type brokenStream struct{}

func (brokenStream) Read([]byte) (int, error)  { return 0, errors.New("broken") }
func (brokenStream) Write([]byte) (int, error) { return 0, errors.New("broken") }

func TestBrokenStreams(t *testing.T) {
	var out strings.Builder
	if exit := (Plugin{Name: "x"}).Run(newEnv("DEL").get, brokenStream{}, &out, io.Discard); exit != 1 ||
		!strings.Contains(out.String(), `"code": 5`) {
		t.Errorf("stdin: exit %d, %s", exit, out.String())
	}
	if exit := (Plugin{Name: "x"}).Run(environ{"CNI_COMMAND": "VERSION"}.get, strings.NewReader(""), brokenStream{}, io.Discard); exit != 1 {
		t.Errorf("stdout: exit %d", exit)
	}
}

func TestLogLine(t *testing.T) {
	p := Plugin{Name: "x", Del: func(r *Request) error { r.Log.Warn("hello"); return nil }}
	o := run(p, newEnv("DEL").with("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"), config(""))
	for _, part := range []string{"hello", "plugin=x", "verb=DEL", "pod=shop/web-0", "container=pod-1", "network=net"} {
		if !strings.Contains(o.stderr, part) {
			t.Errorf("log line %q lacks %s", o.stderr, part)
		}
	}
	if !strings.HasSuffix(fmt.Sprint(o.stderr), "\n") || strings.Count(o.stderr, "\n") != 1 {
		t.Errorf("want one line, got %q", o.stderr)
	}
}
