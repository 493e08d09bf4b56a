// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// A model is a very simple allocator for comparison with the plugin. A model consists of sorted lists and a map.
type model struct {
	pools   [][]netip.Addr        // per set, in the order of the ranges, without gateways
	all     [][]netip.Addr        // with gateways, to find the position of the last address
	last    []netip.Addr          // per set
	leases  map[string]modelLease // by container
	owner   map[netip.Addr]string // container
	resting []netip.Addr          // oldest first
	now     int                   // number of boots
}

type modelLease struct {
	addrs []netip.Addr
	boot  int
}

// next() returns the next free address of the set, or false if no address is free. next() returns a recently released address only if no
// other address is free. After a collection of dead pods, next() returns the next free address, even if it was released recently.
func (m *model) next(set int, collected bool) (netip.Addr, bool) {
	order := m.all[set]
	at := slices.Index(order, m.last[set]) + 1 // after the last address, or at the beginning if that is unknown
	for _, addr := range append(slices.Clone(order[at:]), order[:at]...) {
		if m.owner[addr] == "" && slices.Contains(m.pools[set], addr) && (collected || !slices.Contains(m.resting, addr)) {
			return addr, true
		}
	}
	for _, addr := range m.resting {
		if m.owner[addr] == "" && slices.Contains(m.pools[set], addr) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

func (m *model) release(id string) {
	addrs := slices.SortedFunc(slices.Values(m.leases[id].addrs), netip.Addr.Compare)
	for _, addr := range addrs {
		delete(m.owner, addr)
		m.resting = append(m.resting, addr)
	}
	m.resting = m.resting[max(0, len(m.resting)-maxResting):]
	delete(m.leases, id)
}

// add() returns either the addresses for the container, or an error code.
func (m *model) add(id string, wanted []netip.Addr) (got []netip.Addr, code uint) {
	if had, ok := m.leases[id]; ok {
		if had.boot == m.now {
			return nil, plugin.CodeAddressTaken
		}
		m.release(id)
	}
	for set := range m.pools {
		addr, code := m.take(set, wanted)
		if code != 0 {
			m.leases[id] = modelLease{got, m.now}
			// a failed ADD releases its addresses in the order in which it took them
			for _, addr := range got {
				delete(m.owner, addr)
				m.resting = append(m.resting, addr)
			}
			delete(m.leases, id)
			return nil, code
		}
		m.owner[addr], m.last[set] = id, addr
		m.resting = slices.DeleteFunc(m.resting, func(a netip.Addr) bool { return a == addr })
		got = append(got, addr)
	}
	m.leases[id] = modelLease{got, m.now}
	return got, 0
}

func (m *model) take(set int, wanted []netip.Addr) (netip.Addr, uint) {
	for _, addr := range wanted {
		if !slices.Contains(m.all[set], addr) {
			continue
		}
		if owner := m.owner[addr]; owner != "" && m.leases[owner].boot < m.now {
			m.release(owner)
		}
		if m.owner[addr] != "" || !slices.Contains(m.pools[set], addr) {
			return addr, plugin.CodeAddressTaken
		}
		return addr, 0
	}
	addr, ok := m.next(set, false)
	if ok {
		return addr, 0
	}
	m.collect(set)
	if addr, ok = m.next(set, true); !ok {
		return addr, plugin.CodeExhausted
	}
	return addr, 0
}

// collect() finds each owner from an earlier boot that has an address in the set, and releases all addresses of this owner. It handles the
// owners in the order of their addresses.
func (m *model) collect(set int) {
	var dead []string
	for id, lease := range m.leases {
		if lease.boot < m.now && slices.ContainsFunc(lease.addrs, func(a netip.Addr) bool { return slices.Contains(m.all[set], a) }) {
			dead = append(dead, id)
		}
	}
	m.releaseAll(dead)
}

func (m *model) releaseAll(ids []string) {
	sorted := func(id string) []netip.Addr {
		return slices.SortedFunc(slices.Values(m.leases[id].addrs), netip.Addr.Compare)
	}
	slices.SortFunc(ids, func(a, b string) int { return slices.CompareFunc(sorted(a), sorted(b), netip.Addr.Compare) })
	for _, id := range ids {
		m.release(id)
	}
}

// randomSets returns up to three sets with small ranges of both families. Each gateway is an address inside the range, an address outside
// the range, or the default gateway. The subnets of the sets do not overlap.
func randomSets(random *rand.Rand, m *model) string {
	var sets []string
	for set := range 1 + random.IntN(3) {
		six := random.IntN(2) == 0
		var ranges []string
		var pool, all []netip.Addr
		for r := range 1 + random.IntN(3) {
			text, gateway, addrs := randomRange(random, six, byte(set), byte(r))
			ranges = append(ranges, text)
			all = append(all, addrs...)
			pool = append(pool, slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return a == gateway })...)
		}
		sets = append(sets, "["+strings.Join(ranges, ",")+"]")
		m.pools, m.all, m.last = append(m.pools, pool), append(m.all, all), append(m.last, netip.Addr{})
	}
	return `"ranges":[` + strings.Join(sets, ",") + `]`
}

func randomRange(random *rand.Rand, six bool, set, r byte) (text string, gateway netip.Addr, addrs []netip.Addr) {
	base := netip.AddrFrom4([4]byte{10, set, r, 16 * byte(random.IntN(16))})
	if six {
		base = netip.AddrFrom16([16]byte{0: 0xfd, 2: set, 3: r, 15: 16 * byte(random.IntN(16))})
	}
	small := 1 + random.IntN(4) // host bits
	for range 1 << small {
		addrs = append(addrs, base)
		base = base.Next()
	}
	subnet := netip.PrefixFrom(addrs[0], base.BitLen()-small)
	text = fmt.Sprintf(`{"subnet":%q`, subnet)
	if small > 1 {
		gateway = addrs[1]
		addrs = addrs[1:]
		if !six {
			addrs = addrs[:len(addrs)-1]
		}
	}
	switch random.IntN(4) {
	case 0: // inside
		gateway = addrs[random.IntN(len(addrs))]
		text += fmt.Sprintf(`,"gateway":%q`, gateway)
	case 1: // outside
		gateway = map[bool]netip.Addr{true: netip.MustParseAddr("fe80::1"), false: netip.MustParseAddr("192.0.2.1")}[six]
		text += fmt.Sprintf(`,"gateway":%q`, gateway)
	}
	if random.IntN(3) == 0 {
		from := random.IntN(len(addrs))
		addrs = addrs[from : from+1+random.IntN(len(addrs)-from)]
		text += fmt.Sprintf(`,"rangeStart":%q,"rangeEnd":%q`, addrs[0], addrs[len(addrs)-1])
	}
	return text + "}", gateway, addrs
}

// TestAllocatorAgainstModel compares the plugin's allocator with a simple model for random pools and random CNI commands. The allocator and
// the model must return the same addresses and errors. An address must never have two owners.
func TestAllocatorAgainstModel(t *testing.T) {
	kerneltest.Slow(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 6))
	for range 60 {
		m := &model{leases: map[string]modelLease{}, owner: map[netip.Addr]string{}}
		sets := randomSets(random, m)
		l := newQuickLab(t, sets)
		if err := os.Mkdir(l.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for step := range 80 {
			m.step(l, random)
			if t.Failed() {
				t.Fatalf("step %d of %s", step, sets)
			}
		}
	}
}

func (m *model) step(l lab, random *rand.Rand) {
	l.Helper()
	id := fmt.Sprint("c", random.IntN(20))
	switch kind := random.IntN(40); {
	case kind == 0:
		m.now++
		l.setBootID(fmt.Sprintf("boot-%d", random.Uint64()))
	case kind == 1:
		m.gc(l, random)
	case kind < 14:
		l.ok(l.call("DEL", id, ""))
		m.release(id)
	default:
		var wanted []netip.Addr
		more := ""
		if set := random.IntN(len(m.all)); kind < 18 {
			wanted = []netip.Addr{m.all[set][random.IntN(len(m.all[set]))]}
			more = fmt.Sprintf(`"runtimeConfig":{"ips":[%q]}`, wanted[0])
		}
		want, code := m.add(id, wanted)
		got := l.call("ADD", id, more)
		var addrs []netip.Addr
		for _, ip := range got.IPs {
			addrs = append(addrs, netip.MustParsePrefix(ip.Address).Addr())
		}
		if diff := cmp.Diff(want, addrs, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || got.Code != code {
			l.Errorf("ADD %s %v: %+v, want code %d\n%s", id, wanted, got, code, diff)
		}
		if code == plugin.CodeExhausted {
			m.mustCount(l, got)
		}
	}
	if n := len(l.namesLeft()); n != len(m.owner) {
		l.Errorf("%d leases, want %d", n, len(m.owner))
	}
}

func (m *model) gc(l lab, random *rand.Rand) {
	l.Helper()
	var valid, gone []string
	for id := range m.leases {
		if random.IntN(2) == 0 {
			valid = append(valid, fmt.Sprintf(`{"containerID":%q,"ifname":"eth0"}`, id))
		} else {
			gone = append(gone, id)
		}
	}
	m.releaseAll(gone)
	l.age()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[`+strings.Join(valid, ",")+`]`))
}

// mustCount checks the error of an exhausted set: the set must really be full, and the details of the error must be correct.
func (m *model) mustCount(l lab, a answer) {
	l.Helper()
	for _, pool := range m.pools {
		full := !slices.ContainsFunc(pool, func(addr netip.Addr) bool { return m.owner[addr] == "" })
		if full && strings.Contains(a.Detail, fmt.Sprintf("%d of %d addresses are leased", len(pool), len(pool))) {
			return
		}
	}
	l.Errorf("no set is full, unlike the error says: %s", a.Detail)
}
