// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"

	"github.com/podlace/podlace/pkg/restore"
)

// watchPods restores what other programs remove from the pods' network, until ctx is done.
func (a *agent) watchPods(ctx context.Context) {
	if !a.config.Routes { // the agent has no CAP_NET_ADMIN
		return
	}
	err := restore.Watch(ctx, a.log, func(now restore.Look) {
		a.metrics.restored.Add(float64(now.Restored))
		before := a.look.Swap(&now)
		if before == nil || (before.Err == nil) != (now.Err == nil) || before.Contested != now.Contested {
			a.alarm.wake(onLook)
		}
	})
	if err != nil {
		a.log.Error("what other programs remove from pods is not restored", "error", err)
	}
}

// addLook adds the problems of the last comparison by restore.Watch.
func (a *agent) addLook() {
	last := a.look.Load()
	if last == nil {
		return
	}
	if last.Contested {
		a.addProblem("pods", errors.New("another program keeps removing rules or links of pods; they are restored at most once in 30 s"),
			"stop that program, which the log of podlace-node names", false)
	}
	if last.Err != nil {
		a.addProblem("pods", last.Err, "run podlace doctor on the node", false)
	}
}
