// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin offers the VFs of a node to its pods through the kubelet's device plugin API (v1beta1), each pool of VFs as one
// resource, and tells other programs which VFs a pod has. The daemon keeps running after faults: it reports an absent kubelet, an
// invalid configuration or a missing device, and serves all other resources.
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

	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// daemonOptions holds the paths and options of the daemon. An empty path disables the feature that needs the path.
type daemonOptions struct {
	ConfigFile string // config.json
	Prefix     string // default prefix of resources
	Host       string // name of this node, for entries of the configuration with hosts
	Kubeconfig string // kubeconfig file; "" for the ServiceAccount of the pod
	Instance   string // UID of the daemon's pod, "" outside of a pod
	Strict     bool   // refuse a configuration with an unsupported entry
	UseCDI     bool   // pass device files by CDI annotations unless the configuration says otherwise
	Sysfs      string // /sys
	Dev        string // /dev
	Kubelet    kubeletDirs
	Root       string        // root folder of the kubelet
	Claims     string        // folder for the records of claims
	Pods       string        // folder of the kubelet's PodResources socket
	InfoDir    string        // folder of device-info files
	CDIDir     string        // folder of CDI specifications
	Socket     string        // unix socket for poddevices.Ask
	HTTP       string        // address of /healthz, /readyz and /metrics: host:port, or unix:/path
	AskReady   bool          // only ask another instance at HTTP whether it is ready
	Poll       time.Duration // interval of scanning all devices, in case an event is lost
	// NewDriver creates the DRA driver.
	NewDriver func(dra.Options) claimDriver
	// RestoreVFs restores VFs with the settings of ended pods, for runtimes that never call GC. If nil, VFs are not restored.
	RestoreVFs func() error
}

// checkpointPath returns the path of the kubelet's checkpoint, in which the kubelet stores the devices of pods.
func (o daemonOptions) checkpointPath() string {
	return filepath.Join(o.Kubelet.Plugins, checkpointName)
}

// runDaemon serves all resources until ctx is done, and reads the configuration again at each signal in reload. It fails only at the
// start, for example if the configuration is invalid or a listening address is in use.
func runDaemon(ctx context.Context, o daemonOptions, reload <-chan os.Signal, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d, err := openDaemon(ctx, o, log)
	if err != nil {
		return err
	}
	defer d.running.Wait()
	defer cancel() // ends the goroutines before the wait
	if err := d.listenAll(ctx); err != nil {
		return err
	}
	configs := make(chan struct{}, 1)
	go watch.Folder(ctx, o.Kubelet.Plugins, d.socketsChanged, log)
	if o.Kubelet.Registry != "" {
		go watch.Folder(ctx, o.Kubelet.Registry, d.socketsChanged, log)
	}
	go watch.Folder(ctx, filepath.Dir(o.ConfigFile), func(string) { notify(configs) }, log)
	if o.RestoreVFs != nil {
		d.running.Go(func() { d.restoreLoop(ctx) })
	}
	d.eventLoop(ctx, configs, reload)
	return nil
}

// openDaemon checks the requirements of the daemon, and starts to watch devices until ctx is done.
func openDaemon(ctx context.Context, o daemonOptions, log *slog.Logger) (*daemon, error) {
	data, err := store.ReadFile(o.ConfigFile)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	config, err := pool.Parse(o.poolSource(), data)
	if err != nil {
		return nil, err
	}
	snapshots, err := pci.Watch(ctx, o.Sysfs, o.Poll)
	if err != nil {
		return nil, err
	}
	d := &daemon{
		daemonOptions: o, log: log, count: newCounters(), health: newHealth(nodeFiles{o.Dev, o.Sysfs}),
		gate:      newGate(o.checkpointPath(), o.Claims, o.Root),
		snapshots: snapshots, config: config, configText: data, records: make(chan struct{}, 1), registry: prometheus.NewRegistry(),
		last: map[pci.Address]pci.Device{}, listed: map[string]bool{}, serving: map[string]*registeredService{}, wake: map[chan<- struct{}]bool{},
	}
	d.setSnapshot(<-snapshots)
	d.logUnserved()
	return d, nil
}

// listenAll opens the HTTP listener and then the unix socket, because an instance that fails to start must not replace the socket of a
// running one.
func (d *daemon) listenAll(ctx context.Context) error {
	if d.HTTP != "" {
		if err := d.serveHTTP(ctx); err != nil {
			return err
		}
	}
	if d.Socket != "" {
		return probes.ServeSocket(ctx, d.Socket, d.log, &d.running,
			func(ctx context.Context, l *net.UnixListener) { poddevices.Serve(ctx, l, d.answerQuestion, d.log) })
	}
	return nil
}

// restoreInterval is how often orphaned VFs are searched, and so how long they keep the settings of an ended pod at most.
const restoreInterval = 30 * time.Second

// restoreLoop restores orphaned VFs in intervals until ctx is done.
func (d *daemon) restoreLoop(ctx context.Context) {
	logged := ""
	for {
		text := ""
		if err := d.restoreVFs(); err != nil {
			text = err.Error()
		}
		if text != "" && text != logged {
			d.log.Warn("could not restore orphaned VFs; their next pod or 'podlace gc' will", "error", text)
		}
		logged = text
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(restoreInterval, d.Poll)):
		}
	}
}

// restoreVFs restores orphaned VFs if this instance may change devices. It takes the lock of each VF's journal.
func (d *daemon) restoreVFs() error {
	d.mu.Lock()
	may := d.mayChange()
	d.mu.Unlock()
	if !may {
		return nil
	}
	return d.RestoreVFs()
}

// eventLoop handles the daemon's events, such as changed devices or a changed configuration, until ctx is done.
func (d *daemon) eventLoop(ctx context.Context, configs <-chan struct{}, reload <-chan os.Signal) {
	pods := time.NewTicker(listInterval)
	defer pods.Stop()
	work := make(chan struct{}, 1)
	go d.prepareLoop(ctx, work)
	notify(work)
	d.askPods(ctx)
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
				// Since the daemon's last request, the kubelet may have assigned a device to a pod, and this device may be missing now.
				d.askPods(ctx)
				d.setSnapshot(s)
			case <-configs:
				d.askPods(ctx) // before a device moves to another resource
				waiting = !d.reload(false)
			case <-reload:
				d.askPods(ctx)
				d.reload(true)
			case <-pods.C:
				d.askPods(ctx)  // routes may have changed as well
				d.reload(false) // a changed symbolic link causes no event
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
