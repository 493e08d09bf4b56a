// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// TestFlushed: without the rules nothing is added: they come with the ports of all, in whose sight a mark of the rules would hide the loss.
func TestFlushed(t *testing.T) {
	flush(t)
	h := openHost(t)
	never := func(string, ports.Port) ([]owned, error) { return nil, errors.New("asked") }
	a := owned{Owner: ownerA, Ports: portList("tcp 80 10.1.0.5:80")}
	for range 2 {
		if err := addHostPorts(h, a, never); !errors.Is(err, errFlushed) || len(records(t, "nft table inet "+nft.HostportTable)) > 0 {
			t.Errorf("got %v", err)
		}
	}
	mustDo(t, nft.Build("rules without their mark", buildHostports))
	if err := addHostPorts(h, a, never); !errors.Is(err, errFlushed) || len(portElements(t)) > 0 {
		t.Errorf("got %v", err)
	}
	mustDo(t, restoreHostPorts(h, nil), addHostPorts(h, a, never))
}

// TestRestoreHostPorts: what is missing comes back, and what somebody else has by now stays his.
func TestRestoreHostPorts(t *testing.T) {
	flush(t)
	h := openHost(t)
	a, b := portList("tcp 80 10.1.0.5:80", "tcp 81 10.1.0.5:81"), portList("tcp 90 10.1.0.6:80")
	mustDo(t, addPorts(h, ownerA, "kt0", a), addPorts(h, ownerB, "", b))
	whole := portElements(t)
	all := []owned{{Owner: ownerA, Bridge: "kt0", Ports: a}, {Owner: ownerB, Ports: b}}
	c, err := nftables.New()
	mustDo(t, err)
	c.FlushTable(&nftables.Table{Name: nft.HostportTable, Family: nftables.TableFamilyINet})
	mustDo(t, c.Flush())
	if ok, err := rulesIntact(h); ok || err != nil {
		t.Error("the flush of the rules is not seen", err)
	}
	if err := checkPorts(h, ownerA, a); !isDifferent(err) || !strings.Contains(err.Error(), "are missing") {
		t.Error(err)
	}
	mustDo(t, delPorts(h, ownerB, b), restoreHostPorts(h, all), restoreHostPorts(h, all), checkPorts(h, ownerA, a), checkPorts(h, ownerB, b))
	if diff := cmp.Diff(whole, portElements(t)); diff != "" {
		t.Error(diff)
	}
	all = append(all, owned{Owner: "cccccccccccccccc x", Ports: portList("tcp 80 10.1.0.7:80", "tcp 99 10.1.0.7:80")})
	mustDo(t, restoreHostPorts(h, all), checkPorts(h, ownerA, a))
}
