// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
	"github.com/podlace/podlace/pkg/store"
)

// The warning or error names each port on which a process of the node listens (F-40, S-27).
func TestListeners(t *testing.T) {
	newLab(t)
	tcp, err := net.Listen("tcp", ":7180")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp4", "127.0.0.1:7181")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	for _, x := range []struct{ mappings, names, hint string }{
		{`{"hostPort":7180,"containerPort":80}`, "tcp 7180", "ss -lntp 'sport = :7180'"},
		{`{"hostPort":7181,"containerPort":80,"protocol":"udp"},{"hostPort":7180,"containerPort":80}`, "udp 7181, tcp 7180",
			"ss -lnup 'sport = :7181'"},
		{`{"hostPort":7180,"containerPort":80,"hostIP":"10.71.0.1"}`, "tcp 10.71.0.1:7180", "ss -lntp"},
		{`{"hostPort":7180,"containerPort":80,"protocol":"udp"}`, "", ""},
		{`{"hostPort":7181,"containerPort":80,"protocol":"udp","hostIP":"10.71.0.1"}`, "", ""},
		{`{"hostPort":7180,"containerPort":80,"protocol":"sctp"}`, "", ""},
		{`{"hostPort":7182,"containerPort":80}`, "", ""},
	} {
		for _, refuse := range []bool{false, true} {
			c, err := parsed(fmt.Sprintf(`"refuseHostListeners":%t,`, refuse) + withMappings(x.mappings))
			if err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			r := &plugin.Request{Log: slog.New(slog.NewTextHandler(&log, nil))}
			err = c.checkListeners(r, c.hostPorts([]netip.Prefix{netip.MustParsePrefix("10.71.0.5/24"), netip.MustParsePrefix("fd00:71::5/64")}))
			switch {
			case x.names == "" || !refuse:
				if err != nil {
					t.Errorf("%s: %v", x.mappings, err)
				}
			case plugin.Code(err) != plugin.CodePortConflict || err.Error() != "hostPort "+x.names+": a process of the node listens there":
				t.Errorf("%s: code %d, %v", x.mappings, plugin.Code(err), err)
			}
			warned := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), x.names) &&
				strings.Contains(log.String(), x.hint)
			if want := x.names != "" && !refuse; warned != want || !want && log.Len() > 0 {
				t.Errorf("%s: log %q", x.mappings, log.String())
			}
		}
	}
}

// If the listening processes are unknown, ADD fails only with refuseHostListeners.
func TestListenersUnknown(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		var log bytes.Buffer
		r := &plugin.Request{Log: slog.New(slog.NewTextHandler(&log, nil))}
		// An IPv6 link-local address without an interface cannot be bound.
		err := Config{RefuseListeners: refuse}.checkListeners(r,
			[]ports.Port{{Protocol: "tcp", HostIP: netip.MustParseAddr("fe80::1"), Port: 7183,
				To: netip.MustParseAddrPort("[fd00:71::5]:80")}})
		if (err != nil) != refuse || (log.Len() > 0) == refuse {
			t.Errorf("refuse %t: %v, log %q", refuse, err, log.String())
		}
	}
}

// With refuseHostListeners, ADD fails before it changes anything; without it, the pod gets the port (F-40).
func TestRefuseHostListeners(t *testing.T) {
	eachBackend(t, func(l testLab) {
		listener, err := net.Listen("tcp", ":8080")
		if err != nil {
			l.Fatal(err)
		}
		defer listener.Close()
		l.Fails(l.Call("ADD", "a", "refuseHostListeners", true), plugin.CodePortConflict,
			"hostPort tcp 8080: a process of the node listens there")
		if names, err := os.ReadDir(filepath.Join(store.Root, "net")); l.isMapped("a") || len(names) > 1 {
			l.Errorf("something was changed: %v, %v", names, err)
		}
		l.OK(l.Call("DEL", "a", "refuseHostListeners", true))
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a", "refuseHostListeners", true))
		l.OK(l.Call("DEL", "a"))
		listener.Close()
		l.OK(l.Call("ADD", "a", "refuseHostListeners", true))
		l.OK(l.Call("DEL", "a"))
	})
}

// Each CNI operation reads the conntrack table once, or never without UDP ports (F-38).
func TestConntrackWalks(t *testing.T) {
	eachBackend(t, func(l testLab) {
		walks := func(verb string, keys ...any) int {
			stdin, err := json.Marshal(l.Conf.With(keys...))
			if err != nil {
				l.Fatal(err)
			}
			env := map[string]string{"CNI_COMMAND": verb, "CNI_CONTAINERID": "a", "CNI_IFNAME": "eth0", "CNI_NETNS": l.Pod.Path,
				"CNI_PATH": "/nonexistent", "PODLACE_LOG": "debug"}
			var stdout, stderr bytes.Buffer
			if exit := Plugin().Run(func(name string) string { return env[name] }, bytes.NewReader(stdin), &stdout, &stderr); exit != 0 {
				l.Fatalf("%s: %s", verb, stdout.Bytes())
			}
			return strings.Count(stderr.String(), "conntrack walk")
		}
		udp, tcp := []any{}, object{"portMappings": []any{port(8080, 80, "tcp")}}
		for i := range 20 {
			udp = append(udp, port(5300+i, 53, "udp"))
		}
		many := object{"portMappings": udp}
		for _, x := range []struct {
			verb  string
			ports object
			want  int
		}{{"ADD", many, 1}, {"CHECK", many, 0}, {"ADD", many, 1}, {"DEL", many, 1}, {"DEL", many, 0}, {"ADD", tcp, 0}, {"DEL", tcp, 0}} {
			if got := walks(x.verb, "runtimeConfig", x.ports); got != x.want {
				l.Errorf("%s of %d ports: %d walks, want %d", x.verb, len(x.ports["portMappings"].([]any)), got, x.want)
			}
		}
	})
}

// ADD refuses a broadcast address of the node before it changes anything, but accepts a hostIP that the node does not have yet (S-09).
func TestHostIPOfNode(t *testing.T) {
	eachBackend(t, func(l testLab) {
		var log bytes.Buffer
		l.Stderr = &log
		at := func(hostIP string) object {
			return object{"portMappings": []any{port(8080, 80, "tcp").With("hostIP", hostIP)}}
		}
		l.Fails(l.Call("ADD", "a", "runtimeConfig", at("10.71.0.255")), plugin.CodeConfig, "hostIP 10.71.0.255")
		if l.isMapped("a") {
			l.Error("something is left")
		}
		// The kernel adds the local route of an IPv6 address from a work queue.
		kerneltest.Must(l.T, openHost(l.T).AwaitAddress(netip.MustParseAddr("fd00:71::1"), time.Now().Add(time.Minute)))
		for addr, warns := range map[string]bool{"10.71.0.1": false, "127.0.0.1": false, "fd00:71::1": false, "192.0.2.77": true,
			"2001:db8::77": true} {
			log.Reset()
			l.OK(l.Call("ADD", "a", "runtimeConfig", at(addr)))
			if strings.Contains(log.String(), "hostIP is not assigned") != warns {
				l.Errorf("%s: %s", addr, &log)
			}
			l.OK(l.Call("DEL", "a"))
		}
	})
}
