// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
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

	"github.com/podlace/podlace/pkg/daemon/probes"
)

const (
	// registerTimeout limits a Register call, which the kubelet answers only after it has connected to the endpoint.
	registerTimeout = 10 * time.Second
	// checkInterval is how often the sockets are checked, because a file event about their folder may be lost.
	checkInterval = time.Second
	// watchTimeout is how soon after the registration the kubelet must watch the resource. Otherwise, the connection is considered
	// lost.
	watchTimeout = 10 * time.Second
	// absentFor is the time after which the daemon logs that the kubelet is absent.
	absentFor = 15 * time.Second
	// After each refused registration, the pause doubles, from firstPause up to longestPause.
	firstPause, longestPause = 100 * time.Millisecond, 30 * time.Second
)

// kubeletDirs holds the folders in which plugins register with the kubelet.
type kubeletDirs struct {
	Plugins  string // folder of kubelet.sock, which does not depend on the kubelet's root folder
	Registry string // plugins_registry, in which the kubelet finds endpoints by itself; "" for none
}

func (k kubeletDirs) registerSocket() string { return filepath.Join(k.Plugins, "kubelet.sock") }

// registrar serves an endpoint and keeps it registered with the kubelet.
type registrar struct {
	registerapi.UnimplementedRegistrationServer
	*endpoint
	kubelet kubeletDirs
	server  *grpc.Server
	changed <-chan struct{} // receives when the folder of the sockets has changed

	listener      *net.UnixListener
	path          string
	socketID      probes.SocketID // identity of the listener's socket
	registeredAt  probes.SocketID // kubelet socket at the time of the registration
	absent        time.Time       // since when the kubelet is absent
	absenceLogged bool            // its absence is logged

	mu      sync.Mutex
	known   bool      // the kubelet has accepted the endpoint
	refused bool      // the kubelet refused the endpoint, via the registry
	stale   bool      // the endpoint is registered with outdated options
	at      time.Time // time of the last change of known or refused
}

func newRegistrar(e *endpoint, k kubeletDirs, changed <-chan struct{}) *registrar {
	r := &registrar{endpoint: e, kubelet: k, changed: changed, server: grpc.NewServer()}
	pluginapi.RegisterDevicePluginServer(r.server, r)
	registerapi.RegisterRegistrationServer(r.server, r)
	return r
}

func (r *registrar) socketFolder() string {
	return cmp.Or(r.kubelet.Registry, r.kubelet.Plugins)
}

// run registers the endpoint until ctx is done. After an error, run tries again.
func (r *registrar) run(ctx context.Context) {
	defer r.stop()
	probes.RemoveStale(filepath.Join(r.socketFolder(), socketPrefix(r.socketFolder(), r.resource)+"????????"+socketSuffix))
	pause := firstPause
	for ctx.Err() == nil {
		kubelet, _ := probes.SocketAt(r.kubelet.registerSocket())
		err := r.ensure(ctx)
		if err == nil {
			pause = firstPause
			r.waitForChange(ctx, checkInterval, func() bool { return true })
			continue
		}
		if ctx.Err() == nil {
			r.log.Warn("could not register the resource; retrying", "error", err, "after", pause)
		}
		// Each attempt to register causes file events in the folder, so only a new socket of the kubelet ends the pause early.
		r.waitForChange(ctx, pause, func() bool { id, _ := probes.SocketAt(r.kubelet.registerSocket()); return id != kubelet })
		pause = min(2*pause, longestPause)
	}
}

// waitForChange returns after a pause, or earlier if a file in the folder has changed and worth returns true.
func (r *registrar) waitForChange(ctx context.Context, d time.Duration, worth func() bool) {
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

// ensure creates the socket if it is missing, and registers the endpoint if it is not registered.
func (r *registrar) ensure(ctx context.Context) error {
	r.mu.Lock()
	refused, stale := r.refused, r.stale // since the last call
	r.refused, r.stale = false, false
	r.mu.Unlock()
	if stale {
		r.closeSocket() // only a new socket causes a new registration
	}
	if refused {
		r.closeSocket()
		return errors.New("the kubelet refuses the resource")
	}
	if r.isLost() {
		if err := r.listen(); err != nil {
			return err
		}
	}
	if r.kubelet.Registry != "" {
		r.logAbsent(!r.registered(), "the kubelet does not use the plugin registry: check --kubelet-dir, or use --registration classic",
			r.kubelet.Registry)
		return nil
	}
	id, ok := probes.SocketAt(r.kubelet.registerSocket())
	r.logAbsent(!ok, "the kubelet's socket is missing", r.kubelet.registerSocket())
	if !ok {
		r.setKnown(false)
		return nil // the new socket will cause an event
	}
	if id == r.registeredAt {
		return nil
	}
	if r.registeredAt != (probes.SocketID{}) {
		// The kubelet has a new socket since the last registration. It opens no new connection for an endpoint path that it knows, so
		// the endpoint needs a new one.
		if err := r.listen(); err != nil {
			return err
		}
	}
	if err := r.register(ctx); err != nil {
		r.closeSocket() // the kubelet may know the path now; it treats a known path as an existing connection
		return err
	}
	r.registeredAt = id
	r.setKnown(true)
	return nil
}

// logAbsent logs once that the kubelet is absent, if the absence lasts longer than a restart of the kubelet.
func (r *registrar) logAbsent(absent bool, says, where string) {
	switch {
	case !absent:
		r.absent, r.absenceLogged = time.Time{}, false
	case r.absent.IsZero():
		r.absent = time.Now()
	case !r.absenceLogged && time.Since(r.absent) > absentFor:
		r.log.Warn(says, "at", where)
		r.absenceLogged = true
	}
}

func (r *registrar) registered() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known
}

// isLost reports whether the endpoint's socket is missing, as after a start of the kubelet, which removes all in its folder, or no
// longer used by the kubelet.
func (r *registrar) isLost() bool {
	if r.listener == nil {
		return true
	}
	if id, ok := probes.SocketAt(r.path); !ok || !id.Same(r.socketID) {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known && r.streams.Load() == 0 && time.Since(r.at) > watchTimeout
}

func (r *registrar) listen() error {
	r.closeSocket()
	path := filepath.Join(r.socketFolder(), socketName(r.socketFolder(), r.resource))
	l, id, err := probes.Listen(path)
	if err != nil {
		return err
	}
	r.setKnown(false)
	r.listener, r.socketID, r.registeredAt = l, id, probes.SocketID{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.path = path
	go func() { _ = r.server.Serve(l) }() // returns when l is closed
	return nil
}

// closeSocket closes and removes the socket. It does not end existing connections.
func (r *registrar) closeSocket() {
	if r.listener == nil {
		return
	}
	if id, ok := probes.SocketAt(r.path); ok && id.Same(r.socketID) {
		os.Remove(r.path)
	}
	r.listener.Close()
	r.listener = nil
}

func (r *registrar) stop() {
	r.closeSocket()
	r.server.Stop()
}

// register registers the endpoint with the kubelet. The kubelet then connects to the endpoint.
func (r *registrar) register(ctx context.Context) error {
	conn, err := dial(r.kubelet.registerSocket())
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{Version: pluginapi.Version,
		Endpoint: filepath.Base(r.path), ResourceName: r.resource, Options: r.pluginOptions()})
	if err != nil {
		return fmt.Errorf("register with API version %s: %w", pluginapi.Version, err)
	}
	r.count.registered(r.resource)
	r.log.Info("the resource is registered", "version", pluginapi.Version, "socket", r.path)
	return nil
}

// GetInfo describes the endpoint to a kubelet that found the endpoint's socket in its plugin registry folder.
func (r *registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &registerapi.PluginInfo{Type: registerapi.DevicePlugin, Name: r.resource, Endpoint: r.path,
		SupportedVersions: []string{pluginapi.Version}}, nil
}

// NotifyRegistrationStatus receives the result of the registration from the kubelet.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse,
	error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.refused, r.at = s.GetPluginRegistered(), !s.GetPluginRegistered(), time.Now()
	if r.known {
		r.count.registered(r.resource)
		r.log.Info("the resource is registered", "socket", r.path)
	} else {
		r.log.Warn("the kubelet refuses the resource", "error", s.GetError(), "hint", "the kubelet's log has the reason")
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}

func (r *registrar) setKnown(known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.refused, r.at = known, false, time.Now()
}

// setLeaving stores whether the devices move to DRA. A change registers the endpoint again with other options.
func (r *registrar) setLeaving(leaving bool) {
	if r.leaving.Swap(leaving) != leaving {
		r.setKnown(false)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stale = true
	}
}

// isReady reports whether the kubelet watches the endpoint, so that pods can get devices of the resource.
func (r *registrar) isReady() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known && r.streams.Load() > 0
}

// dial connects to a socket of the kubelet, without credentials because the folder's permissions protect it.
func dial(path string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return conn, nil
}
