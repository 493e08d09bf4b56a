// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestLimitsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: this command is root's")
	}
	for args, want := range map[string]string{
		"a b":                     "usage: podlace limits [POD]",
		"-o xml":                  `invalid argument "xml" for "-o, --output" flag: want table`,
		"--ingress 20M":           "--ingress and --egress need a POD",
		"shop/web --ingress fast": `--ingress "fast" is no rate: want bits per second, such as 20M, 1.5Gi or 64000, or none`,
		"shop/web --egress 20K":   `--egress "20K" is no rate`,
		"shop/web --egress=":      `--egress "": want a value`,
		"shop/web --egress 999":   "--egress rate 999: want 1k to 100G bits per second, or none",
		"--interval 1ms":          "--interval 1ms: want at least 10ms",
		"--interval 5":            "--interval",
	} {
		// No sandbox is needed, because a bad flag is refused before any state is read.
		status, stdout, stderr := run(append([]string{"limits"}, strings.Fields(args)...)...)
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: status %d, %q, %q", args, status, stdout, stderr)
		}
	}
}

func TestBits(t *testing.T) {
	for rate, want := range map[uint64]string{0: "0bit/s", 999: "999bit/s", 1000: "1kbit/s", 20e6: "20Mbit/s", 1e9: "1Gbit/s",
		1e11: "100Gbit/s", 3e12: "3000Gbit/s",
		1234567: "1.234567Mbit/s", 1610612736: "1.610612736Gbit/s", 18446744073709551615: "18446744073.709553Gbit/s"} {
		if got := formatRate(rate); got != want {
			t.Errorf("%d: %s, want %s", rate, got, want)
		}
	}
	for rate, want := range map[uint64]uint64{0: 0, 999: 999, 1234: 1230, 1235: 1240, 19_949_999: 19_900_000, 999_999: 1_000_000} {
		if got := roundRate(rate); got != want {
			t.Errorf("%d: %d, want %d", rate, got, want)
		}
	}
}

func records() []attachment.Record {
	of := func(kind, pod, id, ifname string) attachment.Record {
		return attachment.Record{Key: attachment.Key{Network: "net", ContainerID: id, IfName: ifname}, Plugin: kind, Pod: pod,
			Netns: "/proc/self/ns/net"}
	}
	gone := of("bandwidth", "shop/web", "aaaaaa9", "eth0")
	gone.Netns = "/nonexistent"
	return []attachment.Record{of("bridge", "shop/web", "aaaaaa1", "eth0"), of("bandwidth", "shop/web", "aaaaaa1", "eth0"), gone,
		of("bandwidth", "shop/db", "aaaaaa22", "eth0"), of("bandwidth", "shop/db", "aaaaaa22", "net1"),
		of("bandwidth", plugin.Pod{Name: "lone"}.String(), "eeeeee1", "eth0"),
		of("bridge", "shop/free", "ffffff", "eth0"),
		of("bandwidth", "", "bbbbbb1", "eth0"), of("bandwidth", "", "bbbbbb2", "eth0"), of("bandwidth", "", "short", "eth0"),
		of("bandwidth", "", "dddddd1", "eth0"), of("bandwidth", "", "dddddd12", "eth0")}
}

// TestOfPod: a pod is selected by its name, with or without a namespace, or by a unique prefix of its container ID.
func TestOfPod(t *testing.T) {
	for name, want := range map[string]string{
		"shop/web": "aaaaaa1 aaaaaa1 aaaaaa9", "aaaaaa1": "aaaaaa1 aaaaaa1", "aaaaaa2": "aaaaaa22 aaaaaa22", "aaaaaa22": "aaaaaa22 aaaaaa22",
		"short": "short", "bbbbbb2": "bbbbbb2", "dddddd1": "dddddd1",
		"aaaaaa": "aaaaaa may be pod shop/db or pod shop/web", "bbbbbb": "bbbbbb may be container bbbbbb1 or container bbbbbb2",
		"shop": "no pod shop is", "shop/we": "no pod shop/we is", "aaaaa": "no pod aaaaa is", "": "no pod  is",
		"web": "aaaaaa1 aaaaaa1 aaaaaa9", "lone": "eeeeee1",
		"cccccc": "no pod cccccc is",
	} {
		var ids []string
		found, err := recordsOfPod(records(), name)
		for _, rec := range found {
			ids = append(ids, rec.ContainerID)
		}
		got := strings.Join(ids, " ")
		if err != nil {
			got = err.Error()
		}
		if got, _, _ = strings.Cut(got, " recorded"); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

// TestOne: limits of only one interface change at a time. If the pod's network namespace is gone, it is an error.
func TestOne(t *testing.T) {
	all := bandwidth.Records(records())
	of := func(ids ...string) (list []attachment.Record) {
		for _, rec := range all {
			if slices.Contains(ids, rec.ContainerID) {
				list = append(list, rec)
			}
		}
		return list
	}
	if got, err := selectOne(of("aaaaaa1", "aaaaaa9")); err != nil || len(got) != 1 || got[0].ContainerID != "aaaaaa1" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := selectOne(of("aaaaaa9")); err == nil || !strings.Contains(err.Error(), "pod shop/web has ended: its network namespace is gone") {
		t.Errorf("got %v", err)
	}
	if _, err := selectOne(of("aaaaaa22")); err == nil ||
		!strings.Contains(err.Error(), "pod shop/db has several limited interfaces: select one with --ifname, or by the container ID: "+
			"eth0 of container aaaaaa22 in network net, net1 of container aaaaaa22 in network net") {
		t.Errorf("got %v", err)
	}
}

func directions(ingress, egress *bandwidth.Direction) bandwidth.Both[*bandwidth.Direction] {
	return bandwidth.Both[*bandwidth.Direction]{Ingress: ingress, Egress: egress}
}

// TestLimitsJSON compares the exact JSON, because scripts parse it.
func TestLimitsJSON(t *testing.T) {
	list := []bandwidth.Limits{{Key: attachment.Key{Network: "n", ContainerID: "c1", IfName: "eth0"}, Pod: "shop/web",
		Both: directions(&bandwidth.Direction{Asked: bandwidth.Limit{Rate: 500, Burst: 8000, Annotated: true}, Rate: 1996, Dropped: 3,
			Applied: &kernel.Bucket{Rate: 1000, Burst: 6072, Limit: 24288, Fair: kernel.FairQueue{Packets: 64},
				Counters: kernel.Counters{Sent: 7, Dropped: 9, Waiting: 1500}}},
			&bandwidth.Direction{Asked: bandwidth.Limit{Rate: 20e6, ByAdmin: true}, Missing: "it is lost"}),
	}, {Key: attachment.Key{Network: "n", ContainerID: "c2", IfName: "eth0"}, Gone: true, Both: directions(&bandwidth.Direction{}, nil)}, {
		Key: attachment.Key{Network: "n", ContainerID: "c3", IfName: "eth0"},
		Both: directions(nil, &bandwidth.Direction{Asked: bandwidth.Limit{ByAdmin: true},
			Applied: &kernel.Bucket{Rate: 1000, Burst: 6072, Limit: 24288}}),
	}}
	got, err := json.Marshal(list)
	want := `[{"network":"n","containerID":"c1","ifname":"eth0","pod":"shop/web","gone":false,` +
		`"ingress":{"asked":{"rate":500,"burst":8000,"annotated":true},"applied":{"rate":1000,"burst":6072,"queue":24288,"fair":true},` +
		`"measured":{"rate":1996,"dropped":3,"droppedTotal":9,"waiting":1500}},` +
		`"egress":{"asked":{"rate":20000000,"byAdmin":true},"missing":"it is lost"}},` +
		`{"network":"n","containerID":"c2","ifname":"eth0","gone":true,"ingress":{}},` +
		`{"network":"n","containerID":"c3","ifname":"eth0","gone":false,"egress":{"asked":{"rate":0,"byAdmin":true},` +
		`"applied":{"rate":1000,"burst":6072,"queue":24288},"measured":{"rate":0,"dropped":0,"droppedTotal":0,"waiting":0}}}]`
	if string(got) != want || err != nil {
		t.Errorf("%s, %v, want\n%s", got, err, want)
	}
}

// TestLimitsTable: a limit that the kernel lacks looks different from an interface without one. A pod's name cannot control the terminal.
func TestLimitsTable(t *testing.T) {
	ask := func(rate uint64, admin bool) bandwidth.Limit {
		return bandwidth.Limit{Rate: rate, ByAdmin: admin}
	}
	has := &bandwidth.Direction{Asked: ask(500, false), Rate: 1996, Dropped: 3,
		Applied: &kernel.Bucket{Rate: 1000, Burst: 6072, Limit: 24288, Counters: kernel.Counters{Dropped: 9, Waiting: 1500}}}
	list := []bandwidth.Limits{
		{Key: attachment.Key{Network: "n", ContainerID: "c1", IfName: "eth0"}, Pod: hostile,
			Both: directions(has, &bandwidth.Direction{Asked: ask(20e6, true), Missing: "it is lost"})},
		{Key: attachment.Key{Network: "n", ContainerID: "c2", IfName: "eth0"}, Gone: true, Both: directions(&bandwidth.Direction{}, nil)},
		{Key: attachment.Key{Network: "n", ContainerID: "c3", IfName: "eth0"}, Both: directions(nil, &bandwidth.Direction{Asked: ask(0, true)})},
	}
	var stdout, stderr bytes.Buffer
	printLimits(&stdout, &stderr, list)
	var rows []string
	for line := range strings.Lines(stdout.String()) {
		rows = append(rows, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"NETWORK POD CONTAINER IFNAME LIMIT ASKED APPLIED BURST QUEUE MEASURED DROPPED WAITING",
		"n shop/?[2Jweb?0?? c1 eth0 ingress 500bit/s 1kbit/s 6072 B 24288 B 2kbit/s 3 1500 B",
		"n shop/?[2Jweb?0?? c1 eth0 egress 20Mbit/s by admin missing - - - - -",
		"n - c2 eth0 ingress - gone - - - - -",
		"n - c3 eth0 egress none by admin none - - - - -",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(rows, "\n"), strings.Join(want, "\n"))
	}
	if got := stderr.String(); got != "podlace: egress of container c1, eth0: it is lost: podlace reload restores it\n" {
		t.Errorf("%q", got)
	}
}
