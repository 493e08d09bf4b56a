// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/podlace/podlace/pkg/probes"
)

const (
	// registerTimeout is how long the kubelet may take to answer Register: it connects to the endpoint meanwhile.
	registerTimeout = 10 * time.Second
	// lookEvery is how often the sockets are looked at, should an event of their folder be lost.
	lookEvery = time.Second
	// watchWithin is how soon after the registration the kubelet watches the resource. Who does not has lost the connection.
	watchWithin = 10 * time.Second
	// absentFor is how long no kubelet may be there before it is said.
	absentFor = 15 * time.Second
	// Between these are the pauses after a refusal, each twice as long as the one before.
	firstPause, longestPause = 100 * time.Millisecond, 30 * time.Second
)

// versions are those of the device plugin API that an endpoint speaks, the newest first, and the kubelets that know them.
func versions() []string {
	return []string{
		pluginapi.Version, // v1beta1: since 1.10, and the only one up to 1.37
	}
}

// kubeletDirs are where a kubelet is found.
type kubeletDirs struct {
	Plugins  string // the folder of kubelet.sock; the kubelet has it at a fixed place, whatever its root is
	Registry string // plugins_registry, "" for none: the kubelet finds endpoints there by itself
}

// socket is where plugins register.
func (k kubeletDirs) socket() string { return filepath.Join(k.Plugins, "kubelet.sock") }

// registrar serves an endpoint and keeps it registered, for as long as it runs.
type registrar struct {
	registerapi.UnimplementedRegistrationServer
	*endpoint
	kubelet kubeletDirs
	server  *grpc.Server
	changed <-chan struct{} // something happened in the folder of the sockets

	listener *net.UnixListener
	path     string
	own      probes.SocketID // of the listener
	with     probes.SocketID // the kubelet's socket when it accepted the endpoint
	absent   time.Time       // since when no program registers it
	told     bool            // that no program registers it

	mu      sync.Mutex
	known   bool      // the kubelet has accepted the endpoint
	refused bool      // the kubelet refused it, by the registry
	stale   bool      // it was registered with other options
	at      time.Time // when that became so
}

func newRegistrar(e *endpoint, k kubeletDirs, changed <-chan struct{}) *registrar {
	r := &registrar{endpoint: e, kubelet: k, changed: changed, server: grpc.NewServer(serverBounds()...)}
	pluginapi.RegisterDevicePluginServer(r.server, r)
	registerapi.RegisterRegistrationServer(r.server, r)
	return r
}

// serverBounds bound what a client takes: the kubelet asks for one thing at a time, and in some hundred bytes for each device.
func serverBounds() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(1 << 20), grpc.MaxConcurrentStreams(64), grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(10 * time.Second)}
}

// folder is where the endpoint's socket is.
func (r *registrar) folder() string {
	if r.kubelet.Registry != "" {
		return r.kubelet.Registry
	}
	return r.kubelet.Plugins
}

// run returns when ctx is done, and never else. Whatever fails is tried again.
func (r *registrar) run(ctx context.Context) {
	defer r.stop()
	removeStale(r.folder(), r.resource)
	pause := firstPause
	for ctx.Err() == nil {
		kubelet, _ := probes.SocketAt(r.kubelet.socket())
		err := r.ensure(ctx)
		if err == nil {
			pause = firstPause
			r.wait(ctx, lookEvery, func() bool { return true })
			continue
		}
		if ctx.Err() == nil {
			r.log.Warn("the resource is not registered", "error", err, "again", pause)
		}
		// The sockets that are made on the way are events too: only another kubelet is a reason to hurry.
		r.wait(ctx, pause, func() bool { id, _ := probes.SocketAt(r.kubelet.socket()); return id != kubelet })
		pause = min(2*pause, longestPause)
	}
}

// wait returns after some time, or when something happened in the folder that is worth it.
func (r *registrar) wait(ctx context.Context, d time.Duration, worth func() bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case <-r.changed:
			if worth() {
				return
			}
		}
	}
}

// ensure brings about what is missing: a socket, a registration.
func (r *registrar) ensure(ctx context.Context) error {
	r.mu.Lock()
	refused, stale := r.refused, r.stale // since the last time
	r.refused, r.stale = false, false
	r.mu.Unlock()
	if stale {
		r.close() // a new socket is a new registration
	}
	if refused {
		r.close()
		return errors.New("the kubelet refuses it")
	}
	if r.lost() {
		if err := r.listen(); err != nil {
			return err
		}
	}
	if r.kubelet.Registry != "" {
		r.tellAbsent(!r.registered(), "no kubelet looks into the registry: is it that of the kubelet's root? --registration classic needs none",
			r.kubelet.Registry)
		return nil
	}
	id, ok := probes.SocketAt(r.kubelet.socket())
	r.tellAbsent(!ok, "the kubelet is not there", r.kubelet.socket())
	if !ok {
		r.setKnown(false)
		return nil // its socket will be an event
	}
	if id == r.with {
		return nil
	}
	if r.with != (probes.SocketID{}) {
		// Another kubelet that left the socket alone, or the same one with a new socket, to which this path is a connection that it has.
		if err := r.listen(); err != nil {
			return err
		}
	}
	if err := r.register(ctx); err != nil {
		r.close() // the kubelet may know its path, and would refuse that for a connection that it has
		return err
	}
	r.with = id
	r.setKnown(true)
	return nil
}

// tellAbsent logs once that the kubelet has been away for longer than a restart takes.
func (r *registrar) tellAbsent(absent bool, says, where string) {
	switch {
	case !absent:
		r.absent, r.told = time.Time{}, false
	case r.absent.IsZero():
		r.absent = time.Now()
	case !r.told && time.Since(r.absent) > absentFor:
		r.log.Warn(says, "at", where)
		r.told = true
	}
}

func (r *registrar) registered() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known
}

// lost reports whether the kubelet cannot, or does not, use the socket: it removes all when it starts.
func (r *registrar) lost() bool {
	if r.listener == nil {
		return true
	}
	if id, ok := probes.SocketAt(r.path); !ok || !id.Same(r.own) {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known && r.watched() == 0 && time.Since(r.at) > watchWithin
}

func (r *registrar) listen() error {
	r.close()
	path := filepath.Join(r.folder(), socketName(r.folder(), r.resource))
	l, id, err := probes.Listen(path)
	if err != nil {
		return err
	}
	r.setKnown(false)
	r.listener, r.own, r.with = l, id, probes.SocketID{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.path = path
	go func() { _ = r.server.Serve(l) }() // until l is closed
	return nil
}

// close ends the socket; who is connected stays connected.
func (r *registrar) close() {
	if r.listener == nil {
		return
	}
	if id, ok := probes.SocketAt(r.path); ok && id.Same(r.own) {
		os.Remove(r.path)
	}
	r.listener.Close()
	r.listener = nil
}

func (r *registrar) stop() {
	r.close()
	r.server.Stop()
}

// register tells the kubelet of the endpoint, which it then connects to.
func (r *registrar) register(ctx context.Context) error {
	conn, err := dial(r.kubelet.socket())
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	client := pluginapi.NewRegistrationClient(conn)
	var errs []error
	for _, version := range versions() {
		_, err := client.Register(ctx, &pluginapi.RegisterRequest{Version: version, Endpoint: filepath.Base(r.path), ResourceName: r.resource,
			Options: r.options()})
		if err == nil {
			r.count.registered(r.resource)
			r.log.Info("the resource is registered", "version", version, "socket", r.path)
			return nil
		}
		errs = append(errs, fmt.Errorf("register by %s: %w", version, err))
	}
	return errors.Join(errs...)
}

// GetInfo answers a kubelet that found the socket in its registry.
func (r *registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &registerapi.PluginInfo{Type: registerapi.DevicePlugin, Name: r.resource, Endpoint: r.path, SupportedVersions: versions()}, nil
}

// NotifyRegistrationStatus hears what came of it.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse,
	error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.refused, r.at = s.GetPluginRegistered(), !s.GetPluginRegistered(), time.Now()
	if r.known {
		r.count.registered(r.resource)
		r.log.Info("the resource is registered", "socket", r.path)
	} else {
		r.log.Warn("the kubelet refuses the resource", "error", s.GetError())
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

func (r *registrar) setKnown(known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.refused, r.at = known, false, time.Now()
}

// leave says whether the devices are given out by claims from now on. A change registers the endpoint again, with other options.
func (r *registrar) leave(leaving bool) {
	r.endpoint.mu.Lock()
	changed := r.leaving != leaving
	r.leaving = leaving
	r.endpoint.mu.Unlock()
	if changed {
		r.setKnown(false)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stale = true
	}
}

// ready reports whether pods can get devices of the resource.
func (r *registrar) ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known && r.watched() > 0
}

// dial connects to a socket of the kubelet, which never asks for credentials: its sockets are guarded by their folders.
func dial(path string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<20)))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}
