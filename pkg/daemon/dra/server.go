// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/probes"
)

const (
	firstRestart   = time.Second
	longestRestart = 30 * time.Second
	// checkInterval is the time between two checks of the sockets. Another program may delete the sockets at any time.
	checkInterval = time.Second
)

// serverState is the state of the server that answers the calls of the kubelet.
type serverState struct {
	mu      sync.Mutex
	helper  *kubeletplugin.Helper
	failed  chan error // receives the error of the running server
	whyDown string     // why no server runs
}

// serve() answers calls of the kubelet until ctx is done. After a failure, serve() starts the server again.
func (d *Driver) serve(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the goroutines before the wait
	running.Go(func() { d.lead.holdLead(ctx, d) })
	running.Go(func() { d.collectLoop(ctx) })
	running.Go(func() { d.statusLoop(ctx) })
	running.Go(func() { d.alignLoop(ctx) })
	logged := ""
	for pause := firstRestart; ctx.Err() == nil; {
		began := time.Now()
		err := d.serveOnce(ctx)
		if err == nil {
			break
		}
		d.conn.setDown(err)
		if err.Error() != logged {
			d.options.Log.Error("claims cannot be prepared: the server for the kubelet failed; restarting it", "error", err)
		}
		logged = err.Error()
		if pause = min(2*pause, longestRestart); time.Since(began) > longestRestart {
			pause = firstRestart
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// socketFolders returns the folders of the sockets.
func (o Options) socketFolders() (registry, data string) {
	return filepath.Join(o.Kubelet, "plugins_registry"), filepath.Join(o.Kubelet, "plugins", claim.Driver)
}

// serveOnce answers calls of the kubelet until ctx is done, the server fails, or a socket is lost.
func (d *Driver) serveOnce(ctx context.Context) error {
	if err := d.awaitTurn(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	registry, data := d.options.socketFolders()
	for _, dir := range []string{registry, data} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	failed := make(chan error, 1)
	d.conn.begin(failed)
	options := []kubeletplugin.Option{kubeletplugin.DriverName(claim.Driver), kubeletplugin.KubeClient(d.options.Client),
		kubeletplugin.NodeName(d.options.Node), kubeletplugin.RegistrarDirectoryPath(registry), kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.Serialize(false), kubeletplugin.HealthV1(true), kubeletplugin.HealthV1alpha1(true)}
	if d.options.Instance != "" {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(d.options.Instance)))
	}
	quiet := klog.NewContext(ctx, logr.FromSlogHandler(d.options.Log.Handler()))
	helper, err := kubeletplugin.Start(quiet, callHandler{d}, options...)
	if err != nil {
		return err
	}
	d.conn.start(helper)
	defer helper.Stop()
	sockets := d.socketPaths()
	d.options.Log.Info("ready to prepare claims for the kubelet", "driver", claim.Driver, "sockets", strings.Join(sockets, " "))
	return d.awaitFailure(ctx, sockets, failed)
}

// socketPaths returns the paths of the sockets of this instance.
func (d *Driver) socketPaths() []string {
	registry, data := d.options.socketFolders()
	if uid := d.options.Instance; uid != "" {
		return []string{filepath.Join(registry, kubeletplugin.RollingUpdateRegistrarSocketFile(registry, claim.Driver, types.UID(uid))),
			filepath.Join(data, "dra-"+uid+".sock")}
	}
	return []string{filepath.Join(registry, claim.Driver+"-reg.sock"), filepath.Join(data, "dra.sock")}
}

// awaitFailure waits until ctx is done, the server has failed, or another program has deleted or replaced a socket.
func (d *Driver) awaitFailure(ctx context.Context, sockets []string, failed <-chan error) error {
	own := map[string]probes.SocketID{}
	for _, path := range sockets {
		own[path], _ = probes.SocketAt(path)
	}
	look := time.NewTicker(checkInterval)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-look.C:
		}
		if why := d.lead.whyNotServing(); why != "" {
			return errors.New(why)
		}
		for _, path := range sockets {
			if id, ok := probes.SocketAt(path); !ok || !id.Same(own[path]) {
				return fmt.Errorf("socket %s was removed", path)
			}
		}
	}
}

// HandleError handles errors that the servers of the Kubernetes library report.
func (h callHandler) HandleError(_ context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		h.options.Log.Warn(msg, "error", err)
		return
	}
	h.conn.fail(fmt.Errorf("%s: %w", msg, err))
}

func (c *serverState) begin(failed chan error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = failed
}

func (c *serverState) start(h *kubeletplugin.Helper) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.helper, c.whyDown = h, ""
}

func (c *serverState) setDown(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.helper, c.whyDown = nil, err.Error()
}

func (c *serverState) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case c.failed <- err:
	default:
	}
}

// whyUnregistered returns the reason why the kubelet cannot reach the driver, or "" if the kubelet can reach it.
func (d *Driver) whyUnregistered() string {
	d.conn.mu.Lock()
	defer d.conn.mu.Unlock()
	if d.conn.helper == nil {
		return cmp.Or(d.conn.whyDown, "the server for the kubelet has not started")
	}
	switch status := d.conn.helper.RegistrationStatus(); {
	case status == nil:
		return "the kubelet has not registered driver " + claim.Driver
	case !status.GetPluginRegistered():
		return "the kubelet refuses driver " + claim.Driver + ": " + status.GetError()
	}
	return ""
}

// removeStaleSockets deletes the sockets of killed instances of the driver.
func (d *Driver) removeStaleSockets() {
	registry, data := d.options.socketFolders()
	for _, pattern := range []string{filepath.Join(registry, claim.Driver+"-*-reg.sock"), filepath.Join(data, "dra-*.sock")} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			if probes.Answered(path) {
				continue
			}
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				d.options.Log.Warn("could not delete a stale socket", "socket", path, "error", err)
			}
		}
	}
}
