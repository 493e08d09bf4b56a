// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// model is a very simple allocator of sorted lists and a map, for comparison with the plugin.
type model struct {
	pools [][]netip.Addr // per set, in the order of the ranges, without gateways
	all   [][]netip.Addr // with gateways, to find the position of the last address
	last  []netip.Addr   // per set
	owner map[netip.Addr]modelLease
	now   int // number of boots
}

type modelLease struct {
	id   string
	boot int
}

// next returns the addresses of which the next ADD must take one: the next free one, or in a full set those of earlier boots.
func (m *model) next(set int) (any []netip.Addr) {
	order := m.all[set]
	at := slices.Index(order, m.last[set]) + 1 // after the last address, or at the beginning if that is unknown
	for _, addr := range append(slices.Clone(order[at:]), order[:at]...) {
		is, taken := m.owner[addr]
		switch {
		case !slices.Contains(m.pools[set], addr):
		case !taken:
			return []netip.Addr{addr}
		case is.boot < m.now:
			any = append(any, addr)
		}
	}
	return any
}

// choices returns, for each set, the addresses of which ADD must take one, or the code of the error.
func (m *model) choices(id string, wanted []netip.Addr) (sets [][]netip.Addr, code uint) {
	if len(m.ownedBy(id, m.now)) > 0 {
		return nil, plugin.CodeAddressTaken
	}
	for set := range m.pools {
		any := m.next(set)
		for _, addr := range wanted {
			if !slices.Contains(m.all[set], addr) {
				continue
			}
			if is, taken := m.owner[addr]; taken && is.boot == m.now || !slices.Contains(m.pools[set], addr) {
				return sets, plugin.CodeAddressTaken
			}
			any = []netip.Addr{addr}
		}
		if len(any) == 0 {
			return sets, plugin.CodeExhausted
		}
		sets = append(sets, any)
	}
	return sets, 0
}

// ownedBy returns the addresses that a container got in a boot, or in any boot with -1.
func (m *model) ownedBy(id string, boot int) (list []netip.Addr) {
	for addr, is := range m.owner {
		if is.id == id && (boot < 0 || is.boot == boot) {
			list = append(list, addr)
		}
	}
	return list
}

// releaseEarlier releases the addresses of a set that belong to an earlier boot.
func (m *model) releaseEarlier(set int) {
	for _, addr := range m.pools[set] {
		if is, taken := m.owner[addr]; taken && is.boot < m.now {
			delete(m.owner, addr)
		}
	}
}

func (m *model) release(id string) {
	list := m.ownedBy(id, m.now)
	if len(list) == 0 {
		list = m.ownedBy(id, -1)
	}
	for _, addr := range list {
		delete(m.owner, addr)
	}
}

// randomSets returns up to three sets with small ranges of both families, whose subnets do not overlap. A gateway is inside its range,
// outside, or the default one.
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

// For random pools and CNI commands, the allocator gives the same addresses and errors as the model, and no address two owners.
func TestAllocatorAgainstModel(t *testing.T) {
	kerneltest.Slow(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 6))
	for range 60 {
		m := &model{owner: map[netip.Addr]modelLease{}}
		sets := randomSets(random, m)
		l := newQuickLab(t, sets)
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
	case kind == 0 && len(m.owner) > 0:
		m.now++
		l.reboot()
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
		m.add(l, id, wanted, l.call("ADD", id, more))
	}
	if n := len(l.namesLeft()); n != len(m.owner) {
		l.Errorf("%d leases, want %d", n, len(m.owner))
	}
}

// add compares the answer of an ADD with what the model allows, and follows it.
func (m *model) add(l lab, id string, wanted []netip.Addr, got answer) {
	l.Helper()
	sets, code := m.choices(id, wanted)
	if got.Code != code || code == 0 && len(got.IPs) != len(sets) {
		l.Fatalf("ADD %s %v: %+v, want code %d and one of each of %v", id, wanted, got, code, sets)
	}
	for i, any := range sets {
		addr := netip.MustParseAddr(strings.TrimSpace(l.content(fmt.Sprint(lastPrefix, i))))
		if !slices.Contains(any, addr) {
			l.Errorf("ADD %s %v took %s, want one of %v", id, wanted, addr, any)
		}
		m.last[i] = addr
		if _, full := m.owner[addr]; full && !slices.Contains(wanted, addr) {
			m.releaseEarlier(i)
		}
		delete(m.owner, addr) // a failed ADD gives it back
		if code == 0 {
			m.owner[addr] = modelLease{id, m.now}
		}
	}
	if code == plugin.CodeExhausted {
		m.mustCount(l, got)
	}
}

func (l lab) content(name string) string {
	l.Helper()
	data, err := os.ReadFile(filepath.Join(l.dir, name))
	if err != nil {
		l.Fatal(err)
	}
	return string(data)
}

func (m *model) gc(l lab, random *rand.Rand) {
	l.Helper()
	var valid []string
	for i := range 20 {
		id := fmt.Sprint("c", i)
		if random.IntN(2) == 0 {
			valid = append(valid, fmt.Sprintf(`{"containerID":%q,"ifname":"eth0"}`, id))
			continue
		}
		for _, addr := range m.ownedBy(id, -1) {
			delete(m.owner, addr)
		}
	}
	l.age()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[`+strings.Join(valid, ",")+`]`))
}

// mustCount checks that a set reported as exhausted is full, and the details of the error.
func (m *model) mustCount(l lab, a answer) {
	l.Helper()
	for _, pool := range m.pools {
		full := !slices.ContainsFunc(pool, func(addr netip.Addr) bool { return m.owner[addr].id == "" })
		if full && strings.Contains(a.Detail, fmt.Sprintf("%d of %d addresses are leased", len(pool), len(pool))) {
			return
		}
	}
	l.Errorf("no set is full, unlike the error says: %s", a.Detail)
}
