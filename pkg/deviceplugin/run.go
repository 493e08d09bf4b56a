// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin gives the VFs of a node to its pods: it serves the kubelet's device plugin API (v1beta1), one resource for each pool
// of VFs, and tells others, who know a pod by its name, which VFs that pod was given. It never ends by itself: a kubelet that is away, a
// configuration that became wrong and a device that vanished are told, and what there is goes on.
package deviceplugin

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/dra"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
	"github.com/podlace/podlace/pkg/probes"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/watch"
)

// settings say where everything is. Folders that are "" are done without.
type settings struct {
	ConfigFile string // config.json
	Prefix     string // of resources that name none
	Host       string // name of this node, for entries of the configuration that are for some nodes only
	Kubeconfig string // how to reach the API server; "" for the ServiceAccount of the pod
	Instance   string // UID of the pod of this daemon, "" if it runs in none
	Strict     bool   // refuse a configuration of which a part is not supported
	UseCDI     bool   // hand device nodes over by CDI, in annotations, where the configuration does not say
	Sysfs      string // /sys
	Dev        string // /dev
	Kubelet    kubeletDirs
	Root       string        // the kubelet's root folder
	Claims     string        // the folder of records of claims
	Pods       string        // the folder of the kubelet's PodResources socket
	InfoDir    string        // the folder of device-info files
	CDIDir     string        // the folder of CDI specifications
	Socket     string        // where allocation.Ask is answered
	HTTP       string        // where /healthz, /readyz and /metrics are: host:port, or unix:path
	AskReady   bool          // only ask at HTTP whether another instance is ready
	Poll       time.Duration // how often all devices are looked at, should an event be lost
	// NewDriver makes the driver of resources that are given out by claims.
	NewDriver func(dra.Options) claimDriver
	// Return brings VFs back that ended pods left, for runtimes that never tell a CNI plugin to; nil for not.
	Return func() error
}

// checkpoint is the file in which the kubelet remembers what it gave away, in the folder of its socket.
func (o settings) checkpoint() string { return filepath.Join(o.Kubelet.Plugins, checkpointName) }

// runDaemon serves until ctx is done. It fails only at the start: the configuration is wrong, or an address is taken. reload makes it read
// the configuration again.
func runDaemon(ctx context.Context, o settings, reload <-chan os.Signal, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d, err := open(ctx, o, log)
	if err != nil {
		return err
	}
	defer d.running.Wait()
	defer cancel() // before the wait
	if err := d.listenAll(ctx); err != nil {
		return err
	}
	configs := make(chan struct{}, 1)
	go watch.Folder(ctx, o.Kubelet.Plugins, d.socketsChanged, log)
	if o.Kubelet.Registry != "" {
		go watch.Folder(ctx, o.Kubelet.Registry, d.socketsChanged, log)
	}
	go watch.Folder(ctx, filepath.Dir(o.ConfigFile), func(string) { notify(configs) }, log)
	if o.Return != nil {
		d.running.Go(func() { d.returnAlways(ctx) })
	}
	d.loop(ctx, configs, reload)
	return nil
}

// open reads what has to be right before anything is served, and watches devices until ctx is done.
func open(ctx context.Context, o settings, log *slog.Logger) (*daemon, error) {
	data, err := store.ReadFile(o.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	config, err := pool.Parse(o.source(), data)
	if err != nil {
		return nil, err
	}
	snapshots, err := pci.Watch(ctx, o.Sysfs, o.Poll)
	if err != nil {
		return nil, err
	}
	d := &daemon{
		settings: o, log: log, count: newCounters(), health: newHealth(nodeFiles{o.Dev, o.Sysfs}),
		gate:      newGate(o.checkpoint(), o.Claims, o.Root),
		snapshots: snapshots, config: config, text: data, records: make(chan struct{}, 1), registry: prometheus.NewRegistry(),
		last: map[pci.Address]pci.Device{}, told: map[string]bool{}, serving: map[string]*service{}, wake: map[chan<- struct{}]bool{},
	}
	d.setSnapshot(<-snapshots)
	d.logUnserved()
	return d, nil
}

// listenAll opens what others ask. The socket, which another instance may still have, comes last: who cannot start takes nothing away.
func (d *daemon) listenAll(ctx context.Context) error {
	if d.HTTP != "" {
		if err := d.serveHTTP(ctx); err != nil {
			return err
		}
	}
	if d.Socket != "" {
		return probes.ServeSocket(ctx, d.Socket, d.log, &d.running,
			func(ctx context.Context, l *net.UnixListener) { allocation.Serve(ctx, l, d.answer, d.log) })
	}
	return nil
}

// returnEvery is how long a VF may stay as a pod has left it, when no other pod needs it.
const returnEvery = 30 * time.Second

// returnAlways returns when ctx is done.
func (d *daemon) returnAlways(ctx context.Context) {
	told := ""
	for {
		text := ""
		if err := d.returnVFs(); err != nil {
			text = err.Error()
		}
		if text != "" && text != told {
			d.log.Warn("VFs that ended pods left cannot be brought back here: their next pod, or podlace gc, does it", "error", text)
		}
		told = text
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(returnEvery, d.Poll)):
		}
	}
}

// returnVFs brings VFs back that ended pods left, if this instance changes devices. Each VF's journal is locked meanwhile.
func (d *daemon) returnVFs() error {
	d.mu.Lock()
	may := d.mayChange()
	d.mu.Unlock()
	if !may {
		return nil
	}
	return d.Return()
}

// loop returns when ctx is done.
func (d *daemon) loop(ctx context.Context, configs <-chan struct{}, reload <-chan os.Signal) {
	pods := time.NewTicker(pollPods)
	defer pods.Stop()
	work := make(chan struct{}, 1)
	go d.prepareAlways(ctx, work)
	notify(work)
	d.askPods(ctx)
	d.forgetDevices()
	for {
		notify(work)
		var due <-chan time.Time
		if again := d.refresh(ctx); !again.IsZero() {
			due = time.After(time.Until(again))
		}
		for waiting := true; waiting; {
			waiting = false
			select {
			case <-ctx.Done():
				return
			case s, more := <-d.snapshots:
				if !more {
					return
				}
				// A device that went may be one that a pod was given since the kubelet was last asked.
				d.askPods(ctx)
				d.setSnapshot(s)
			case <-configs:
				d.askPods(ctx) // before a device changes hands
				waiting = !d.reload(false)
			case <-reload:
				d.askPods(ctx)
				d.reload(true)
			case <-pods.C:
				d.askPods(ctx)  // and routes may have changed
				d.reload(false) // where a link leads, nothing tells
			case <-d.records:
			case <-due:
			}
		}
	}
}

func (d *daemon) setSnapshot(s *pci.Snapshot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.snapshot = s
	for _, device := range s.Devices {
		if len(device.Interfaces) > 0 {
			d.last[device.Address] = device
		}
	}
}
