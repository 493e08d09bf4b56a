// SPDX-License-Identifier: Apache-2.0

package crio_test

import (
	"strings"
	"syscall"
	"testing"

	api "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/podlace/podlace/integration/e2e/containerd/cri"
)

// TestUserNamespace: a pod has its own user namespace, which owns the pod's network namespace. ADD and CHECK succeed.
func TestUserNamespace(t *testing.T) {
	c := cri.Open(t, socket)
	p := cri.RunPod(t, c, "own-users", func(config *api.PodSandboxConfig) {
		ids := []*api.IDMapping{{HostId: 200000, ContainerId: 0, Length: 65536}}
		config.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &api.UserNamespace{Mode: api.NamespaceMode_POD, Uids: ids, Gids: ids}
	}, cri.Limits("100M", "100M"))
	if got := strings.Fields(p.Exec("cat", "/proc/self/uid_map")); len(got) != 3 || got[1] != "200000" {
		t.Errorf("the container's uid_map is %v", got)
	}
	if err := p.SeenAsNode(); err != nil {
		t.Error(err)
	}
	restartCRIO(t, c, syscall.SIGKILL, nil)
	if got, err := c.Network(t.Context(), p.Sandbox); err != nil || got != p.Network {
		t.Errorf("after a restart the pod has %+v, %v: want %+v", got, err, p.Network)
	}
}
