// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestCheckWaits: the test begins once the DaemonSet's pod is ready on each of its nodes, or not at all if it is stopped before.
func TestCheckWaits(t *testing.T) {
	pod := func(node, ready string) string {
		return fmt.Sprintf(`{"spec": {"nodeName": %q}, "status": {
			"hostIPs": [{"ip": "192.0.2.1"}], "podIPs": [{"ip": "10.244.1.2"}], "conditions": [{"type": "Ready", "status": %q}]}}`, node, ready)
	}
	stages := []struct {
		nodes int
		pods  []string
	}{{0, nil}, {2, []string{pod("n1", "True")}}, {2, []string{pod("n1", "True"), pod("n2", "False")}},
		{2, []string{pod("n1", "True"), pod("n2", "True")}}}
	var asked atomic.Int32 // for the DaemonSet, after the pods
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := stages[min(int(asked.Load()), len(stages)-1)]
		switch r.URL.Path {
		case "/api/v1/namespaces/x/pods":
			fmt.Fprintf(w, `{"items": [%s]}`, strings.Join(now.pods, ", "))
		case "/apis/apps/v1/namespaces/x/daemonsets/server":
			asked.Add(1)
			fmt.Fprintf(w, `{"status": {"desiredNumberScheduled": %d}}`, now.nodes)
		case "/api/v1/namespaces/x/services/server":
			fmt.Fprint(w, `{"spec": {"clusterIPs": ["10.96.0.9"]}}`)
		default:
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	defer server.Close()
	api, err := client((&fakeAPI{t: t}).kubeconfig(server.URL), "", newConnections())
	if err != nil {
		t.Fatal(err)
	}
	k := check{namespace: "x"}
	c, err := k.cluster(t.Context(), api)
	if err != nil || c.Nodes != 2 || len(c.Service) != 1 || len(c.Servers) != 2 || c.Servers[1].NotReady || c.Servers[1].Node != "n2" ||
		len(c.Servers[0].IPs) != 1 || len(c.Servers[0].NodeIPs) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if _, err := k.cluster(ctx, api); err == nil || time.Since(began) >= checkWait {
		t.Errorf("stopped: %v after %v", err, time.Since(began))
	}
}
