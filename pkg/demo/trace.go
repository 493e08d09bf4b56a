// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/meter"
	"github.com/podlace/podlace/pkg/sandbox"
)

// Traced describes one traced run of a plugin: its duration, its phases, its changes and its error.
type Traced struct {
	Verb    string        `json:"verb"`
	Plugin  string        `json:"plugin"`
	Took    time.Duration `json:"took"` // nanoseconds
	Phases  []Phase       `json:"phases,omitempty"`
	Changes []Change      `json:"changes,omitempty"`
	Error   string        `json:"error,omitempty"`
}

// TraceOptions contains the options of the function Trace.
type TraceOptions struct {
	Options
	HostPort int    // number of the pod's hostPort, or 0
	Limit    uint64 // limit of the pod in both directions, in bits per second, or 0
	Ping     bool   // the node pings each address of the pod, and the pod must answer
}

// Trace runs ADD, CHECK and DEL for a new pod, calls the function `show` after each plugin, and removes the pod. The network namespace of
// the process serves as the node. The returned error contains the failures of ADD, CHECK and DEL. DEL runs even if ADD or CHECK failed.
func Trace(ctx context.Context, opts TraceOptions, show func(Traced)) (err error) {
	// The plugins inherit PODLACE_LOG=debug, and therefore log each change and each phase.
	if err := os.Setenv("PODLACE_LOG", "debug"); err != nil {
		return err
	}
	cache, err := os.MkdirTemp("", "podlace-trace")
	if err != nil {
		return err
	}
	defer os.RemoveAll(cache)
	list, err := libcni.NetworkConfFromBytes(opts.Conflist)
	if err != nil {
		return fmt.Errorf("conflist: %w", err)
	}
	space, err := sandbox.NewPod("podlace-trace-" + strings.ToLower(rand.Text()[:8]))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, space.Close()) }()
	cni := libcni.NewCNIConfigWithCacheDir([]string{opts.Plugins}, cache, &tracingExec{show: show})
	t := tracer{chain: chain{cni: cni, list: list, exec: &timedExec{}}, pod: &pod{Pod: space, attachment: attachment{
		container: space.Name, netns: space.Path, ifname: "eth0", podName: space.Name, limit: opts.Limit}}}
	if opts.HostPort > 0 {
		t.pod.ports = []portMapping{{HostPort: opts.HostPort, ContainerPort: opts.HostPort, Protocol: "tcp"}}
	}
	err = t.addAndCheck(ctx, opts.Ping)
	// A failed ADD may leave state that only DEL removes.
	return errors.Join(err, t.remove(context.WithoutCancel(ctx)))
}

// remove() runs DEL. If a plugin's DEL fails, libcni does not call the remaining plugins. After an error, remove() calls all plugins one by
// one, so that no state of the pod stays.
func (t tracer) remove(ctx context.Context) error {
	_, err := t.del(ctx, t.pod.attachment)
	if err == nil {
		return nil
	}
	for _, p := range slices.Backward(t.list.Plugins) {
		config, err := libcni.InjectConf(p, map[string]any{"name": t.list.Name, "cniVersion": t.list.CNIVersion})
		if err == nil {
			_ = t.cni.DelNetwork(ctx, config, t.pod.runtimeConf())
		}
	}
	return err
}

// A tracer consists of a plugin chain and the pod for which the chain runs. The plugins log each change that they make.
type tracer struct {
	chain
	pod *pod
}

func (t tracer) addAndCheck(ctx context.Context, ping bool) error {
	result, _, err := t.add(ctx, t.pod.attachment)
	if err != nil {
		return err
	}
	t.pod.storeAddresses(result)
	if ping {
		if err := t.ping(ctx); err != nil {
			return err
		}
	}
	return t.check(ctx, t.pod.attachment)
}

// ping() sends echo requests from the node to each address of the pod.
func (t tracer) ping(ctx context.Context) error {
	for _, addr := range []netip.Addr{t.pod.v4, t.pod.v6} {
		if !addr.IsValid() {
			continue
		}
		r, err := meter.Ping(ctx, meter.Flow{From: func(f func() error) error { return f() }, Listen: netip.AddrPortFrom(addr, 0),
			Duration: pings * meter.PingInterval, Patience: patience})
		if err == nil && r.Lost == r.Sent {
			err = fmt.Errorf("none of %d echo requests was answered", r.Sent)
		}
		if err != nil {
			return fmt.Errorf("the node asks the pod's address %s: %w", addr, err)
		}
	}
	return nil
}

// tracingExec runs plugins in the same way as libcni. After each run, tracingExec passes the phases and the changes in the plugin's debug
// log to the function `show`.
type tracingExec struct {
	version.PluginDecoder
	show func(Traced)
}

// ExecPlugin runs one plugin process.
func (e *tracingExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var log bytes.Buffer
	began := time.Now()
	out, err := (&invoke.RawExec{Stderr: &log}).ExecPlugin(ctx, path, stdin, environ)
	ended := time.Now()
	t := Traced{Verb: command(environ), Plugin: filepath.Base(path), Took: ended.Sub(began)}
	t.Phases, t.Changes = readLog(log.String(), began, ended)
	if err != nil {
		t.Error = err.Error()
	}
	if t.Verb != "VERSION" {
		e.show(t)
	}
	return out, err
}

// FindInPath returns the path of a plugin.
func (*tracingExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}
