// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/podlace/podlace/pkg/restore"
)

// watchPods restores what other programs remove from the pods' network, until ctx is done. It adds requests to the API server to running.
func (a *agent) watchPods(ctx context.Context, api rest.Interface, running *sync.WaitGroup) {
	err := restore.Watch(ctx, a.log, func(now restore.Look) {
		a.metrics.restored.Add(float64(now.Restored))
		before := cmp.Or(a.look.Swap(&now), &restore.Look{})
		if (before.Err == nil) != (now.Err == nil) || before.Contested != now.Contested {
			a.alarm.wake(onLook)
		}
		if now.Contested != "" && before.Contested == "" {
			running.Go(func() { a.announce(ctx, api, contestedText(now.Contested)) })
		}
	})
	if err != nil {
		a.look.Store(&restore.Look{Err: fmt.Errorf("what other programs remove is not restored until podlace-node restarts: %w", err)})
		a.alarm.wake(onLook)
	}
}

// addLook adds the problems of the last comparison by restore.Watch.
func (a *agent) addLook() {
	last := cmp.Or(a.look.Load(), &restore.Look{})
	if last.Contested != "" {
		a.addProblem("pods", errors.New(contestedText(last.Contested)), "stop that program", false)
	}
	if last.Err != nil {
		a.addProblem("pods", last.Err, "run podlace doctor on the node", false)
	}
}

func contestedText(removed string) string {
	return "another program keeps removing what pods need (" + removed + "); it is restored at most once in 30 s"
}

// announce creates a warning Event of the Node object, which `kubectl describe node` shows.
func (a *agent) announce(ctx context.Context, api rest.Interface, message string) {
	ctx, cancel := context.WithTimeout(ctx, a.times.announce)
	defer cancel()
	now, node := metav1.Now(), corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: a.Node}
	a.nodes.mu.Lock()
	node.UID = types.UID(a.nodes.byName[a.Node].UID)
	a.nodes.mu.Unlock()
	err := api.Post().Namespace(metav1.NamespaceDefault).Resource("events").Body(&corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: a.Node + ".", Namespace: metav1.NamespaceDefault},
		InvolvedObject: node, Type: corev1.EventTypeWarning, Reason: "PodNetworkContested", Message: message, Count: 1,
		FirstTimestamp: now, LastTimestamp: now, Source: corev1.EventSource{Component: "podlace-node", Host: a.Node},
	}).Do(ctx).Error()
	if err != nil {
		a.log.Warn("the Event of the Node object cannot be created", "error", err)
	}
}
