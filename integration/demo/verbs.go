// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/plugin"
)

// Codes that say nothing about the cause: codeNone is zero, and codeUnknown is for errors without a code of their own.
const (
	codeNone    = 0
	codeUnknown = 999
	// codeLacking is the code for a missing kernel feature.
	codeLacking = 105
)

var errNoAddress = errors.New("the pod has no such address")

// warmUp adds and deletes a first pod, so that the baseline has what stays after a pod's DEL, such as the bridge and the static rules. If a
// plugin lacks a kernel feature, it switches the capability off, and the demo skips the steps that need it.
func warmUp(ctx context.Context, l *lab) outcome {
	for {
		err := l.warmUpOnce(ctx)
		if err == nil {
			break
		}
		if !l.dropLacking(err) {
			return failed(err)
		}
	}
	if err := l.recordBaseline(); err != nil {
		return failed(err)
	}
	return outcome{verdict: OK, measured: "both work"}
}

func (l *lab) warmUpOnce(ctx context.Context) error {
	_, calls, err := l.chain.add(ctx, l.warm.Attachment)
	if err != nil {
		_, _ = l.chain.del(ctx, l.warm.Attachment)
		return pluginError{plugin: last(calls), error: err}
	}
	_, err = l.chain.del(ctx, l.warm.Attachment)
	return err
}

// pluginError is an error of a chain, with the plugin that failed.
type pluginError struct {
	plugin string
	error
}

// Unwrap returns the error without the plugin's name.
func (e pluginError) Unwrap() error { return e.error }

func last(calls []chain.Call) string {
	if len(calls) == 0 {
		return ""
	}
	return calls[len(calls)-1].Plugin
}

// dropLacking adapts the chain if err means that the kernel lacks a feature: it switches off the capability of the plugin or part that
// failed, or else masquerade.
func (l *lab) dropLacking(err error) bool {
	var failing pluginError
	e, isCNI := coded(err)
	if !isCNI || e.Code != codeLacking || !errors.As(err, &failing) {
		return false
	}
	for feature, capability := range capabilities() {
		if failing.plugin == feature || strings.HasPrefix(e.Msg, plugin.PodType+" ("+feature+") ") {
			if _, lacking := l.lacks[feature]; lacking {
				return false // it fails without the capability too
			}
			l.lacks[feature] = e.Msg
			return l.chain.removeCapability(capability) == nil
		}
	}
	if _, lacking := l.lacks[masquerading]; lacking {
		return false
	}
	l.lacks[masquerading] = e.Msg
	return l.chain.disableMasquerade() == nil
}

func addPod(which func(*lab) *pod) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		p := which(l)
		start := time.Now()
		result, calls, err := l.chain.add(ctx, p.Attachment)
		took := time.Since(start)
		l.adds = calls
		if err != nil {
			return failed(err)
		}
		p.storeAddresses(result)
		if err := p.serve(); err != nil {
			return failed(err)
		}
		return timed(took, addTime).withNote("%s, %s", plural(len(calls), "process", "processes"), p.addresses())
	}
}

func (p *pod) addresses() string {
	var list []string
	if p.v4.IsValid() {
		list = append(list, p.v4.String())
	}
	if p.v6.IsValid() {
		list = append(list, p.v6.String())
	}
	return strings.Join(list, " ")
}

// timeOf shows how long one plugin took in the previous ADD.
func timeOf(plugin string) func(context.Context, *lab) outcome {
	return func(_ context.Context, l *lab) outcome {
		for _, c := range l.adds {
			if c.Plugin == plugin {
				return milliseconds(c.Took)
			}
		}
		return outcome{verdict: Info, measured: "did not run"}
	}
}

func checkPod(which func(*lab) *pod) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		start := time.Now()
		if err := l.chain.check(ctx, which(l).Attachment); err != nil {
			return failed(err)
		}
		return outcome{verdict: OK, measured: "clean"}.withNote("%.1f ms", float64(time.Since(start))/float64(time.Millisecond))
	}
}

// addInvalidPort runs ADD with an invalid port number. The error must have the pod's name and an informative code.
func addInvalidPort(ctx context.Context, l *lab) outcome {
	defer func() { _, _ = l.chain.del(ctx, l.bad.Attachment) }()
	_, _, err := l.chain.add(ctx, l.bad.Attachment)
	if err == nil {
		return outcome{verdict: Miss, measured: "accepted"}
	}
	e, isCNI := coded(err)
	if !isCNI {
		return failed(err)
	}
	named := strings.Contains(e.Msg+e.Details, podNamespace+"/"+l.bad.PodName)
	measured := fmt.Sprintf("code %d, pod named", e.Code)
	if !named {
		measured = fmt.Sprintf("code %d, no pod named", e.Code)
	}
	return verdictFor(named && e.Code != codeNone && e.Code != codeUnknown, measured).withNote("%s", e.Msg)
}

func delPod(which func(*lab) *pod) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		p := which(l)
		p.stopServer()
		lo := p.Attachment
		lo.IfName = "lo"
		if _, err := l.loopback.del(ctx, lo); err != nil {
			return failed(err)
		}
		start := time.Now()
		calls, err := l.chain.del(ctx, p.Attachment)
		took := time.Since(start)
		if err != nil {
			return failed(err)
		}
		return timed(took, delTime).withNote("%s", shares(calls))
	}
}

func shares(calls []chain.Call) string {
	var list []string
	for _, c := range calls {
		list = append(list, fmt.Sprintf("%s %.1f", c.Plugin, float64(c.Took)/float64(time.Millisecond)))
	}
	return strings.Join(list, ", ")
}

func delAgain(which func(*lab) *pod) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		if _, err := l.chain.del(ctx, which(l).Attachment); err != nil {
			return failed(err)
		}
		return outcome{verdict: OK, measured: "succeeds"}
	}
}

// delGone simulates a node after a crash: the pod's namespace is gone, and the runtime calls DEL with the data in its cache.
func delGone(ctx context.Context, l *lab) outcome {
	l.b.stopServer()
	if err := l.b.Close(); err != nil {
		return failed(err)
	}
	gone := l.b.Attachment
	gone.Netns = ""
	if _, err := l.chain.del(ctx, gone); err != nil {
		return failed(err)
	}
	return outcome{verdict: OK, measured: "succeeds"}
}

func leftovers(ctx context.Context, l *lab) outcome {
	if l.before == nil {
		return failed(errors.New("no baseline: the first pod failed"))
	}
	diff, err := l.stateLeft(ctx)
	if err != nil {
		return failed(err)
	}
	o := verdictFor(len(diff) == 0, fmt.Sprint(len(diff)))
	o.value, o.unit = float64(len(diff)), "leftovers"
	o.note = firstLines(diff, 6)
	return o
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
