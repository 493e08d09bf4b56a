// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"fmt"
	"os"
	"strings"
	"testing"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// crowdedNode returns a node with a hundred pods. Each of these pods has one device.
func crowdedNode() (pods []*api.PodResources, noted []written) {
	for i := range 100 {
		id, uid := fmt.Sprintf("0000:3b:%02x.%d", i/8, i%8), fmt.Sprintf("8d3c1c4e-0000-4000-8000-%012d", i)
		p := webPod("app", id)
		p.Name = fmt.Sprintf("web-%d", i)
		pods = append(pods, p)
		noted = append(noted, written{uid, "app", "example.com/fast", map[int64][]string{0: {id}}, []byte(strings.Repeat("x", 250))})
	}
	return pods, noted
}

// BenchmarkAsk measures what the client adds to the kubelet's own time for one Ask on a node with a hundred pods that have devices. A
// CNI plugin waits for both.
func BenchmarkAsk(b *testing.B) {
	pods, noted := crowdedNode()
	for name, k := range map[string]*fakeKubelet{"Get": {get: always(pods[0])},
		"List": {list: func(int) ([]*api.PodResources, error) { return pods, nil }}} {
		startServer(b, k)
		for _, uid := range []string{"", noted[0].PodUID} {
			b.Run(fmt.Sprintf("%s/checkpoint=%t", name, uid != ""), func(b *testing.B) {
				k.note(b, noted...)
				for b.Loop() {
					if got, err := Ask(b.Context(), k.Kubelet, "shop", "web-0", uid); err != nil || len(got) != 1 {
						b.Fatal(got, err)
					}
				}
			})
		}
	}
}

// BenchmarkCheckpoint measures how long it takes to read the kubelet's checkpoint.
func BenchmarkCheckpoint(b *testing.B) {
	_, noted := crowdedNode()
	data := marshal(b, noted)
	path := b.TempDir() + "/checkpoint"
	if err := os.WriteFile(path, data, 0o600); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(len(data)), "bytes")
	for b.Loop() {
		if got, err := readCheckpoint(path, noted[50].PodUID); err != nil || len(got) != 1 {
			b.Fatal(got, err)
		}
	}
}
