// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"context"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/pkg/daemon/podresources"
)

// TestKubeletAnswers: as package podresources requires, the kubelet's answers distinguish a pod with VFs, one without, another of the same
// name and an unknown one.
func TestKubeletAnswers(t *testing.T) {
	l := newLab(t, "none")
	ids := l.runPod("one", vfs(2))
	l.runPod("none", vfs(0))
	ask := func(pod, uid string) ([]string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		devices, err := podresources.Ask(ctx, podresources.At(kubeletRoot), "shop", pod, uid)
		var got []string
		for _, d := range devices {
			got = append(got, d.ID)
		}
		slices.Sort(got)
		return got, err
	}
	one, none := l.statusOf("one").Metadata.UID, l.statusOf("none").Metadata.UID
	for _, q := range []struct {
		pod, uid string
		want     []string
		says     string
	}{
		{"one-node", one, ids, ""},
		{"none-node", none, nil, ""},
		{"one-node", none, nil, "another pod of the same name"},
		{"none-node", one, nil, "another pod of the same name"},
	} {
		got, err := ask(q.pod, q.uid)
		if !slices.Equal(got, q.want) || (err == nil) != (q.says == "") || err != nil && !strings.Contains(err.Error(), q.says) {
			t.Errorf("%s as %s: %v, %v: want %v, %q", q.pod, q.uid, got, err, q.want, q.says)
		}
	}
	if _, err := ask("two-node", one); !errors.Is(err, podresources.ErrUnknownPod) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an unknown pod: %v", err)
	}
	l.checkUnknownPod()

	if notes, err := podresources.CheckpointDevices(podresources.At(kubeletRoot).Checkpoint); err != nil || len(notes) != len(ids) {
		t.Errorf("the checkpoint has %v, %v: want %v", notes, err, ids)
	}
}

// checkUnknownPod checks the kubelet's code and text for an unknown pod.
func (l *testLab) checkUnknownPod() {
	l.t.Helper()
	conn, err := grpc.NewClient("unix://"+podSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		l.t.Fatal(err)
	}
	defer conn.Close()
	_, err = api.NewPodResourcesListerClient(conn).Get(l.t.Context(), &api.GetPodResourcesRequest{PodNamespace: "shop", PodName: "two-node"})
	if want := "pod two-node in namespace shop not found"; status.Code(err) != codes.Unknown || status.Convert(err).Message() != want {
		l.t.Errorf("%v: want code Unknown, %s", err, want)
	}
}

// TestGetLocked: KubeletPodResourcesGet is locked to true in current kubelets, so a single pod can always be requested. Older ones, in
// which it can be disabled, are covered by the tests of package podresources.
func TestGetLocked(t *testing.T) {
	node.Skip(t)
	k := newKubelet(t, "none")
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, kubeletPath(), "--config", k.config, "--feature-gates",
		"KubeletPodResourcesGet=false").CombinedOutput()
	if !strings.Contains(string(out), "KubeletPodResourcesGet") || !strings.Contains(string(out), "locked to true") {
		t.Errorf("%v: %s", err, out)
	}
}
