// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/probes"
)

const (
	restartPause = time.Second
	// checkInterval is the time between two checks of the sockets and of the leader lock. Another program may delete them at any time.
	checkInterval = time.Second
)

// serve answers calls of the kubelet until ctx is done. After a failure, serve starts the server again.
func (d *Driver) serve(ctx context.Context) {
	for ctx.Err() == nil {
		_, news := d.watchInventory()
		if d.whyNotServing() == "" {
			err := d.serveOnce(ctx)
			d.setServer(nil, err)
			if d.failures.isDue("serve", err, time.Now()) {
				d.options.Log.Error("claims cannot be prepared: the server for the kubelet failed; restarting it", "error", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-news:
		case <-time.After(restartPause):
		}
	}
}

// whyNotServing returns why this instance must not serve the kubelet at the moment, or "".
func (d *Driver) whyNotServing() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.whyWaiting
}

func (d *Driver) setServer(h *kubeletplugin.Helper, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.helper, d.whyDown = h, ""; err != nil {
		d.whyDown = err.Error()
	}
}

func (o Options) socketFolders() (registry, data string) {
	return filepath.Join(o.Kubelet, "plugins_registry"), filepath.Join(o.Kubelet, "plugins", claim.Driver)
}

// serveOnce answers calls of the kubelet until ctx is done, the server fails, or a socket is lost.
func (d *Driver) serveOnce(ctx context.Context) error {
	registry, data := d.options.socketFolders()
	for _, dir := range []string{registry, data} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	select {
	case err := <-d.failed:
		d.options.Log.Debug("the former server failed again", "error", err)
	default:
	}
	options := append(d.metadataOptions(), kubeletplugin.DriverName(claim.Driver), kubeletplugin.KubeClient(d.options.Client),
		kubeletplugin.RegistrarDirectoryPath(registry), kubeletplugin.PluginDataDirectoryPath(data), kubeletplugin.Serialize(false))
	if d.options.Instance != "" {
		options = append(options, kubeletplugin.RollingUpdate(types.UID(d.options.Instance)))
	}
	quiet := klog.NewContext(ctx, logr.FromSlogHandler(d.options.Log.Handler()))
	helper, err := kubeletplugin.Start(quiet, callHandler{d}, options...)
	if err != nil {
		return err
	}
	d.setServer(helper, nil)
	defer helper.Stop()
	sockets := d.socketPaths()
	d.options.Log.Info("ready to prepare claims for the kubelet", "driver", claim.Driver, "sockets", strings.Join(sockets, " "))
	return d.awaitFailure(ctx, sockets)
}

func (d *Driver) socketPaths() []string {
	registry, data := d.options.socketFolders()
	if uid := d.options.Instance; uid != "" {
		return []string{filepath.Join(registry, kubeletplugin.RollingUpdateRegistrarSocketFile(registry, claim.Driver, types.UID(uid))),
			filepath.Join(data, "dra-"+uid+".sock")}
	}
	return []string{filepath.Join(registry, claim.Driver+"-reg.sock"), filepath.Join(data, "dra.sock")}
}

// awaitFailure waits until ctx is done, the server fails, a socket is deleted or replaced, or this instance must no longer serve the
// kubelet.
func (d *Driver) awaitFailure(ctx context.Context, sockets []string) error {
	own := map[string]probes.SocketID{}
	for _, path := range sockets {
		own[path], _ = probes.SocketAt(path)
	}
	look := time.NewTicker(checkInterval)
	defer look.Stop()
	for d.whyNotServing() == "" {
		select {
		case <-ctx.Done():
			return nil
		case err := <-d.failed:
			return err
		case <-look.C:
		}
		for _, path := range sockets {
			if id, ok := probes.SocketAt(path); !ok || !id.Same(own[path]) {
				return fmt.Errorf("socket %s was removed", path)
			}
		}
	}
	return nil
}

// HandleError handles errors that the servers of the Kubernetes library report.
func (h callHandler) HandleError(_ context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		h.options.Log.Warn(msg, "error", err)
		return
	}
	select {
	case h.failed <- fmt.Errorf("%s: %w", msg, err):
	default:
	}
}

// Ready returns why pods cannot get devices through claims yet, or "".
func (d *Driver) Ready() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.helper == nil {
		return cmp.Or(d.whyWaiting, d.whyDown, "the server for the kubelet has not started")
	}
	switch status := d.helper.RegistrationStatus(); {
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
	probes.RemoveStale(filepath.Join(registry, claim.Driver+"-*-reg.sock"))
	probes.RemoveStale(filepath.Join(data, "dra-*.sock"))
}
