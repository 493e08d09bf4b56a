// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// crowd returns a node of a hundred pods with one device each.
func crowd() (pods []*api.PodResources, noted []written) {
	for i := range 100 {
		id, uid := fmt.Sprintf("0000:3b:%02x.%d", i/8, i%8), fmt.Sprintf("8d3c1c4e-0000-4000-8000-%012d", i)
		p := web("app", id)
		p.Name = fmt.Sprintf("web-%d", i)
		pods = append(pods, p)
		noted = append(noted, written{uid, "app", "example.com/fast", map[int64][]string{0: {id}}, []byte(strings.Repeat("x", 250))})
	}
	return pods, noted
}

// BenchmarkAsk measures one call on a node of a hundred pods with devices. It is the part of a CNI plugin's wait that the client adds to
// the kubelet's own time.
func BenchmarkAsk(b *testing.B) {
	pods, noted := crowd()
	for name, k := range map[string]*kubelet{"Get": {get: always(pods[0])},
		"List": {list: func(int) ([]*api.PodResources, error) { return pods, nil }}} {
		start(b, k)
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

// BenchmarkGRPC measures the same call with the gRPC library, on a new connection each time.
func BenchmarkGRPC(b *testing.B) {
	pods, _ := crowd()
	k := start(b, &kubelet{get: always(pods[0])})
	for b.Loop() {
		conn, err := grpc.NewClient("unix://"+k.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := api.NewPodResourcesListerClient(conn).Get(b.Context(),
			&api.GetPodResourcesRequest{PodNamespace: "shop", PodName: "web-0"}); err != nil {
			b.Fatal(err)
		}
		conn.Close()
	}
}

// BenchmarkCheckpoint measures reading the checkpoint.
func BenchmarkCheckpoint(b *testing.B) {
	_, noted := crowd()
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
