// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	churnNamespace = "churn"
	churnBatch     = 5
	churnEvery     = 6 * time.Second // 50 pods a minute
)

// podChurn creates and deletes pods on all nodes until it is stopped.
type podChurn struct {
	*testCluster
	stop    chan struct{}
	running sync.WaitGroup
	began   time.Time
	made    int
	errs    []error
}

func (c *testCluster) churn(t *testing.T) *podChurn {
	t.Helper()
	c.applyObjects(t, map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": churnNamespace}})
	// No pod starts before its namespace has the default ServiceAccount.
	c.kubectl(t, "-n", churnNamespace, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
	r := &podChurn{testCluster: c, stop: make(chan struct{}), began: time.Now()}
	r.running.Go(r.run)
	return r
}

func (r *podChurn) run() {
	for batch := 0; ; batch++ {
		if batch >= 2 {
			r.note(r.deleteBatch(batch - 2))
		}
		r.note(r.make(batch))
		select {
		case <-r.stop:
			return
		case <-time.After(time.Until(r.began.Add(time.Duration(batch+1) * churnEvery))):
		}
	}
}

func (r *podChurn) note(err error) {
	if err != nil {
		r.errs = append(r.errs, err)
	}
}

func (r *podChurn) make(batch int) error {
	var items []any
	for i := range churnBatch {
		items = append(items, idlePod(churnNamespace, fmt.Sprintf("pod-%d-%d", batch, i), 1+(batch*churnBatch+i)%3, fmt.Sprint(batch)))
	}
	data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err == nil {
		_, err = r.try("exec", string(data), "plane", "kubectl", "create", "-f", "-")
	}
	if err == nil {
		r.made += len(items)
	}
	return err
}

// idlePod returns the manifest of an idle pod on the node with the given number.
func idlePod(namespace, name string, node int, batch string) any {
	return map[string]any{"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": namespace, "labels": map[string]any{"batch": batch}},
		"spec": map[string]any{"nodeName": fmt.Sprintf("node%d", node), "terminationGracePeriodSeconds": 0,
			"tolerations": []any{map[string]any{"operator": "Exists"}},
			"containers":  []any{map[string]any{"name": "a", "image": "podlace.test/busybox:1"}}}}
}

// deleteBatch deletes the pods of a batch once all of them run.
func (r *podChurn) deleteBatch(batch int) error {
	of := fmt.Sprintf("batch=%d", batch)
	_, err := r.try("exec", "", "plane", "kubectl", "-n", churnNamespace, "wait", "--for=condition=Ready", "pods", "-l", of, "--timeout=180s")
	if err == nil {
		_, err = r.try("exec", "", "plane", "kubectl", "-n", churnNamespace, "delete", "pods", "-l", of, "--wait=false")
	}
	return err
}

// endChurn waits until all pods have started and are deleted. Each ADD and DEL must have succeeded.
func (r *podChurn) endChurn(t *testing.T) {
	t.Helper()
	close(r.stop)
	r.running.Wait()
	took := time.Since(r.began)
	for batch := max(0, r.made/churnBatch-2); batch < r.made/churnBatch; batch++ {
		r.note(r.deleteBatch(batch))
	}
	r.kubectl(t, "-n", churnNamespace, "wait", "--for=delete", "pods", "--all", "--timeout=180s")
	failed := r.failedSandboxes(t, churnNamespace)
	t.Logf("%d pods made and deleted, %.0f a minute; failed ADD and DEL: %d; load %s", r.made, float64(r.made)/took.Minutes(),
		len(failed), loadAverage())
	for _, text := range failed {
		t.Errorf("ADD or DEL failed: %s", text)
	}
	for _, err := range r.errs {
		t.Errorf("a pod did not start: %v", err)
	}
	if r.made == 0 {
		t.Error("no pod was made")
	}
	r.kubectl(t, "delete", "namespace", churnNamespace, "--wait=false")
}

// failedSandboxes returns the events of sandboxes that the runtime could not create or end.
func (c *testCluster) failedSandboxes(t *testing.T, namespace string) (texts []string) {
	t.Helper()
	var events struct {
		Items []struct {
			Reason, Message string
			Count           int
		}
	}
	c.getObjects(t, &events, "-n", namespace, "events")
	for _, e := range events.Items {
		if strings.Contains(e.Reason, "PodSandBox") || e.Reason == "FailedKillPod" || e.Reason == "NetworkNotReady" {
			texts = append(texts, fmt.Sprintf("%s %d times: %s", e.Reason, e.Count, e.Message))
		}
	}
	return texts
}
