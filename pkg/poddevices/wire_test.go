// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestWire checks the encoder and the decoder byte for byte, because a device plugin and an sriov plugin of different releases must
// understand each other.
func TestWire(t *testing.T) {
	device := Device{Namespace: "shop", Pod: "web-0", Container: "app", Index: 1, Resource: "example.com/fast", ID: "0000:3b:10.2",
		CPUs: []int64{2, 3}}
	claimed := Device{Namespace: "shop", Pod: "web-0", Resource: "example.com/fast", ID: "0000:3b:10.3", Claim: &Claim{UID: "c-0",
		Namespace: "shop", Name: "web-0-vf-x7k2p", PodClaim: "vf", Request: "nic/fast", Result: 1, Pool: "node1", Device: "0000-3b-10-3",
		ShareID: "s-0", Admin: true}}
	for _, c := range []struct {
		line string
		of   any
		into any
	}{
		{`{}`, &Question{}, new(Question)},
		{`{"namespace":"shop","pod":"web-0","uid":"u-0","resources":["example.com/fast","example.com/slow"]}`,
			&Question{Namespace: "shop", Pod: "web-0", UID: "u-0", Resources: []string{"example.com/fast", "example.com/slow"}}, new(Question)},
		{`{"devices":[]}`, &Answer{Devices: []Device{}}, new(Answer)},
		{`{"devices":[{"namespace":"shop","pod":"web-0","container":"app","index":1,"resource":"example.com/fast","id":"0000:3b:10.2","cpus":[2,3]},` +
			`{"namespace":"","pod":"","container":"","index":0,"resource":"","id":""}],"faults":{"0000:3b:10.3":"the link is down"}}`,
			&Answer{Devices: []Device{device, {}},
				Faults: map[string]string{"0000:3b:10.3": "the link is down"}}, new(Answer)},
		{`{"devices":[{"namespace":"shop","pod":"web-0","container":"","index":0,"resource":"example.com/fast","id":"0000:3b:10.3","claim":` +
			`{"uid":"c-0","namespace":"shop","name":"web-0-vf-x7k2p","podClaim":"vf","request":"nic/fast","result":1,"pool":"node1",` +
			`"device":"0000-3b-10-3","shareID":"s-0","admin":true}}]}`,
			&Answer{Devices: []Device{claimed}}, new(Answer)},
		{`{"devices":null,"error":"who knows","cause":"the claim is not prepared"}`, &Answer{Error: "who knows", Cause: ErrUnprepared}, new(Answer)},
		{`{"pod":"web-0","folder":"/var/lib/kubelet","inUse":true,"timeout":5000000000}`, &KubeletQuestion{Question: Question{Pod: "web-0"},
			Folder: "/var/lib/kubelet", InUse: true, Timeout: 5 * time.Second}, new(KubeletQuestion)},
	} {
		var written bytes.Buffer
		if err := write(&written, c.of); err != nil || written.String() != c.line+"\n" {
			t.Errorf("%v\ngot  %swant %s", err, &written, c.line)
		}
		if err := read(strings.NewReader(c.line+"\n"), c.into); err != nil || !cmp.Equal(c.of, c.into) {
			t.Errorf("%s: %v\n%s", c.line, err, cmp.Diff(c.of, c.into))
		}
	}
}

func TestNotOnTheWire(t *testing.T) {
	var written bytes.Buffer
	err := write(&written, Answer{Devices: []Device{{ID: "0000:3b:10.2", UID: "u-0", NUMA: []int{1}}}})
	if want := `{"devices":[{"namespace":"","pod":"","container":"","index":0,"resource":"","id":"0000:3b:10.2"}]}` + "\n"; err != nil ||
		written.String() != want {
		t.Errorf("%v\ngot  %swant %s", err, &written, want)
	}
}
