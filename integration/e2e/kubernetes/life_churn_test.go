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

// A churn creates and deletes pods on all nodes until it is stopped: the kubelets run 50 ADDs and 50 DELs a minute.
type churn struct {
	*cluster
	stop    chan struct{}
	running sync.WaitGroup
	began   time.Time
	made    int
	errs    []error
}

func (c *cluster) churn(t *testing.T) *churn {
	t.Helper()
	c.apply(t, map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": churnNamespace}})
	// Pods wait for the ServiceAccount of their namespace.
	c.kubectl(t, "-n", churnNamespace, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
	r := &churn{cluster: c, stop: make(chan struct{}), began: time.Now()}
	r.running.Go(r.run)
	return r
}

func (r *churn) run() {
	for batch := 0; ; batch++ {
		if batch >= 2 {
			r.note(r.remove(batch - 2))
		}
		r.note(r.make(batch))
		select {
		case <-r.stop:
			return
		case <-time.After(time.Until(r.began.Add(time.Duration(batch+1) * churnEvery))):
		}
	}
}

func (r *churn) note(err error) {
	if err != nil {
		r.errs = append(r.errs, err)
	}
}

func (r *churn) make(batch int) error {
	var items []any
	for i := range churnBatch {
		items = append(items, sleeper(churnNamespace, fmt.Sprintf("pod-%d-%d", batch, i), 1+(batch*churnBatch+i)%3, fmt.Sprint(batch)))
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

// sleeper returns an idle pod on a node by number.
func sleeper(namespace, name string, node int, batch string) any {
	return map[string]any{"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": namespace, "labels": map[string]any{"batch": batch}},
		"spec": map[string]any{"nodeName": fmt.Sprintf("node%d", node), "terminationGracePeriodSeconds": 0,
			"tolerations": []any{map[string]any{"operator": "Exists"}},
			"containers":  []any{map[string]any{"name": "a", "image": "podlace.test/busybox:1"}}}}
}

// remove deletes the pods of a batch once each of them runs.
func (r *churn) remove(batch int) error {
	of := fmt.Sprintf("batch=%d", batch)
	_, err := r.try("exec", "", "plane", "kubectl", "-n", churnNamespace, "wait", "--for=condition=Ready", "pods", "-l", of, "--timeout=180s")
	if err == nil {
		_, err = r.try("exec", "", "plane", "kubectl", "-n", churnNamespace, "delete", "pods", "-l", of, "--wait=false")
	}
	return err
}

// end waits until all pods have started and are deleted, and fails the test unless each ADD and DEL succeeded.
func (r *churn) end(t *testing.T) {
	t.Helper()
	close(r.stop)
	r.running.Wait()
	took := time.Since(r.began)
	for batch := max(0, r.made/churnBatch-2); batch < r.made/churnBatch; batch++ {
		r.note(r.remove(batch))
	}
	r.kubectl(t, "-n", churnNamespace, "wait", "--for=delete", "pods", "--all", "--timeout=180s")
	failed := r.failures(t, churnNamespace)
	t.Logf("%d pods made and deleted, %.0f a minute; failed ADD and DEL: %d; load %s", r.made, float64(r.made)/took.Minutes(), len(failed), load())
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

// failures returns the kubelets' events for sandboxes of a namespace that the runtime could not create or end.
func (c *cluster) failures(t *testing.T, namespace string) (texts []string) {
	t.Helper()
	var events struct {
		Items []struct {
			Reason, Message string
			Count           int
		}
	}
	c.list(t, &events, "-n", namespace, "events")
	for _, e := range events.Items {
		if strings.Contains(e.Reason, "PodSandBox") || e.Reason == "FailedKillPod" || e.Reason == "NetworkNotReady" {
			texts = append(texts, fmt.Sprintf("%s %d times: %s", e.Reason, e.Count, e.Message))
		}
	}
	return texts
}
