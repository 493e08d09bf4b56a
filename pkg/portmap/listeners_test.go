// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestListeners (F-40, S-27): a port that a process of the node listens on is named, in a warning or in an error.
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
		{`{"hostPort":7181,"containerPort":80,"protocol":"udp"},{"hostPort":7180,"containerPort":80}`, "udp 7181, tcp 7180", "ss -lnup 'sport = :7181'"},
		{`{"hostPort":7180,"containerPort":80,"hostIP":"10.71.0.1"}`, "tcp 10.71.0.1:7180", "ss -lntp"},
		{`{"hostPort":7180,"containerPort":80,"protocol":"udp"}`, "", ""},
		{`{"hostPort":7181,"containerPort":80,"protocol":"udp","hostIP":"10.71.0.1"}`, "", ""},
		{`{"hostPort":7180,"containerPort":80,"protocol":"sctp"}`, "", ""},
		{`{"hostPort":7182,"containerPort":80}`, "", ""},
	} {
		for _, refuse := range []bool{false, true} {
			c, err := parsed(fmt.Sprintf(`"refuseHostListeners":%t,`, refuse) + mappings(x.mappings))
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
			warned := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), x.names) && strings.Contains(log.String(), x.hint)
			if want := x.names != "" && !refuse; warned != want || !want && log.Len() > 0 {
				t.Errorf("%s: log %q", x.mappings, log.String())
			}
		}
	}
}

// TestListenersUnknown: what cannot be known is refused only where the configuration wants to know.
func TestListenersUnknown(t *testing.T) {
	for _, refuse := range []bool{false, true} {
		var log bytes.Buffer
		r := &plugin.Request{Log: slog.New(slog.NewTextHandler(&log, nil))}
		// IPv6 with the scope of no interface cannot be bound.
		err := Config{RefuseListeners: refuse}.checkListeners(r, []kernel.HostPort{{Protocol: "tcp", HostIP: netip.MustParseAddr("fe80::1"), Port: 7183,
			To: netip.MustParseAddrPort("[fd00:71::5]:80")}})
		if (err != nil) != refuse || (log.Len() > 0) == refuse {
			t.Errorf("refuse %t: %v, log %q", refuse, err, log.String())
		}
	}
}
