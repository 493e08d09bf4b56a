// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"net"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/plugin"
)

func ranges(list ...object) object {
	var sets []any
	for _, r := range list {
		sets = append(sets, []any{r})
	}
	return object{"type": "host-local", "ranges": sets}
}

// TestPointToPoint: in a subnet of two addresses, the pod and the configured gateway have one each and reach each other.
func TestPointToPoint(t *testing.T) {
	l := newLab(t, "bridge", "bt31", "ipMasq", false, "isDefaultGateway", true,
		"ipam", ranges(object{"subnet": "10.64.0.0/31", "gateway": "10.64.0.0"}, object{"subnet": "fd00:64::/127", "gateway": "fd00:64::1"}))
	a := l.add("a")
	l.OK(a.check())
	for _, gateway := range []string{"10.64.0.0", "fd00:64::1"} {
		server, err := net.Listen("tcp", net.JoinHostPort(gateway, "0"))
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		err = l.Pod.Do(func() error {
			conn, err := net.DialTimeout("tcp", server.Addr().String(), 10*time.Second)
			if err == nil {
				conn.Close()
			}
			return err
		})
		if err != nil {
			t.Errorf("from the pod to %s: %v", gateway, err)
		}
	}
}

// TestNoRoomForGateway: ADD returns a clear error and leaves no state if a pool of one or two addresses has no room for a gateway.
func TestNoRoomForGateway(t *testing.T) {
	l := newLab(t, "bridge", "bt32", "ipMasq", false)
	for _, subnet := range []string{"10.64.0.0/31", "10.64.0.7/32", "fd00:64::/127", "fd00:64::/128"} {
		l.Fails(l.Call("ADD", "a", "ipam", ranges(object{"subnet": subnet})), plugin.CodeConfig, "isGateway: address ")
		o := l.OK(l.Call("ADD", "a", "isGateway", false, "ipam", ranges(object{"subnet": subnet})))
		var r types100.Result
		if err := json.Unmarshal(o.Stdout, &r); err != nil || len(r.IPs) != 1 || r.IPs[0].Gateway != nil {
			t.Errorf("%s: %+v, %v", subnet, r, err)
		}
		l.OK(l.Call("DEL", "a"))
	}
}
