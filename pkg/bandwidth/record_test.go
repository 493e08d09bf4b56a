// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// Recorded states in version 1 of the format, which must not change by a single byte: after an upgrade or a rollback, each release must
// read the other's records.
const (
	stateOfADD = `{"link":"bwt0","index":7,"ifb":"bwpc3a99edf74e2","ingress":{"rate":20000000,"burst":10000,"limit":50197},` +
		`"egress":{"rate":10000000,"burst":500000,"limit":131108},"asked":{"ingress":{"rate":20000000,"burst":4294967295},` +
		`"egress":{"rate":10000000,"burst":4000000,"annotated":true}},"latency":20000000,"clsact":true}`
	stateOfAdmin = `{"link":"bwt0","index":7,"ifb":"bwpc3a99edf74e2","ingress":{"rate":5000000,"burst":5672,"limit":23331},` +
		`"egress":{"rate":10000000,"burst":500000,"limit":131108},"asked":{"ingress":{"rate":5000000,"byAdmin":true},` +
		`"egress":{"rate":10000000,"burst":4000000,"annotated":true}},"latency":20000000,"clsact":true}`
	stateOfLifted = `{"link":"bwt0","index":7,"ingress":{"rate":5000000,"burst":5672,"limit":23331},` +
		`"asked":{"ingress":{"rate":5000000,"byAdmin":true},"egress":{"rate":0,"byAdmin":true}},"latency":20000000}`
	stateOfFair = `{"link":"bwt0","index":7,"ifb":"bwpc3a99edf74e2","ingress":{"rate":20000000,"burst":10000,"limit":50197,` +
		`"fair":{"target":10000000,"interval":100000000,"packets":176}},"egress":{"rate":10000000,"burst":500000,"limit":131108,` +
		`"fair":{"target":10000000,"interval":100000000,"packets":88}},"asked":{"ingress":{"rate":20000000,"burst":4294967295},` +
		`"egress":{"rate":10000000,"burst":4000000,"annotated":true}},"latency":20000000}`
)

// annotatedConfig is the configuration for which ADD records stateOfADD.
var annotatedConfig = []any{"latency", "20ms", "runtimeConfig", object{
	"bandwidth":                         object{"ingressRate": 20_000_000, "ingressBurst": 1<<32 - 1, "egressRate": 10_000_000},
	"io.kubernetes.cri.pod-annotations": object{"podlace.io/egress-burst": "4M"},
}}

// Parsing and formatting a recorded state loses no data.
func TestStateFormat(t *testing.T) {
	for _, text := range []string{stateOfADD, stateOfAdmin, stateOfLifted, stateOfFair} {
		var st state
		if err := json.Unmarshal([]byte(text), &st); err != nil {
			t.Fatal(err)
		}
		if again, err := json.Marshal(st); string(again) != text || err != nil {
			t.Errorf("%s, %v, was\n%s", again, err, text)
		}
		if st.Link != "bwt0" || st.Index != 7 || st.Ingress == nil || st.Ingress.Limit == 0 || (st.IFB != "") != (st.Egress != nil) ||
			st.Latency == 0 || st.hasFairQueues() != (text == stateOfFair) || st.Asked.Ingress.ByAdmin == (st.Ingress.Rate == 20e6) {
			t.Errorf("%+v of %s", st, text)
		}
	}
}

// The state that plan returns has the format of the recorded states.
func TestStatePlanned(t *testing.T) {
	config, err := json.Marshal(object{annotatedConfig[0].(string): annotatedConfig[1], annotatedConfig[2].(string): annotatedConfig[3]})
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := parsed(string(config[1 : len(config)-1]))
	if err != nil {
		t.Fatal(err)
	}
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	got, err := json.Marshal(c.plan(key, kernel.Link{Name: "bwt0", Index: 7, MTU: 1400}, true))
	if string(got) != stateOfFair || err != nil {
		t.Errorf("%s, %v, want\n%s", got, err, stateOfFair)
	}
}

// All CNI operations can use a record that ADD or an admin wrote.
func TestRecordRead(t *testing.T) {
	l := newLab(t)
	fair := regexp.MustCompile(`,"fair":{[^}]*}`)
	file := "/run/podlace/net/bandwidth-" + l.key("a").Hash()
	index := fmt.Sprintf(`"index":%d`, l.hostSide.Index)
	written := func(want string) {
		t.Helper()
		data, err := os.ReadFile(file)
		var rec attachment.Record
		l.must(err, json.Unmarshal(data, &rec))
		got := fair.ReplaceAllString(string(rec.State), "") // whatever the kernel has
		if want = strings.ReplaceAll(want, `"index":7`, index); got != want {
			t.Errorf("recorded %s, want\n%s", got, want)
		}
	}
	record := func(state string) {
		t.Helper()
		text := fmt.Sprintf(`{"format":1,"network":"net","containerID":"a","ifname":"eth0","plugin":"bandwidth","pod":"shop/web-0",`+
			`"netns":%q,"state":%s}`, l.Pod.Path, strings.ReplaceAll(state, `"index":7`, index))
		l.must(os.WriteFile(file, []byte(text), 0o600))
	}
	l.OK(l.Call("ADD", "a", annotatedConfig...))
	written(stateOfADD)
	l.OK(l.Call("CHECK", "a", annotatedConfig...))
	l.must(l.set(new(uint64(5e6)), nil))
	written(stateOfAdmin)
	l.must(l.set(nil, new(uint64(0))))
	written(stateOfLifted)

	l.must(l.host.Unshape(l.hostSide))
	for _, c := range []struct{ state, applied string }{
		{stateOfADD, "20000000/10000000 redirected true"}, {stateOfAdmin, "20000000/10000000 redirected true"},
	} {
		record(c.state)
		l.must(Restore(l.host, discard()))
		if got := l.applied("a"); got != c.applied {
			t.Errorf("restored %s, want %s", got, c.applied)
		}
	}
	l.Fails(l.Call("CHECK", "a", annotatedConfig...), 100, "the token bucket of bwt0 is") // an admin's limit; ADD's limit is applied
	record(stateOfADD)
	l.OK(l.Call("CHECK", "a", annotatedConfig...))
	if got := l.look(); got.Pod != "shop/web-0" || got.Ingress.Asked.Burst != 1<<32-1 || !got.Egress.Asked.Annotated || got.Missing() {
		t.Errorf("%+v", got)
	}
	l.OK(l.Call("DEL", "a"))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
}

// ADD sets WithLink in the record, so that the plugin that deletes the link also deletes the record.
func TestRecordGoesWithLink(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	records, err := attachment.RecordsOf(l.key("a"), "bandwidth")
	if err != nil || !records["bandwidth"].WithLink {
		t.Errorf("%+v, %v", records, err)
	}
	l.OK(l.Call("DEL", "a"))
}
