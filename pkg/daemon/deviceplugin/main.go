// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/daemon/probes"
	cni "github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// Default values of flags.
const (
	defaultKubelet = "/var/lib/kubelet"
	defaultPlugins = "/var/lib/kubelet/device-plugins"
	defaultDev     = "/dev"
	defaultInfo    = "/var/run/k8s.cni.cncf.io/devinfo/dp"
	defaultCDI     = "/var/run/cdi"
	defaultHTTP    = "127.0.0.1:9809"
	defaultPoll    = time.Minute
)

// readyTimeout limits the wait for a running instance to report whether it is ready.
const readyTimeout = 5 * time.Second

// Main runs the device plugin until SIGINT or SIGTERM and returns the exit status: 2 for wrong arguments, 1 if the start failed.
func Main(args []string, stderr io.Writer) int {
	o, level, err := parseFlags(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	log := slog.New(slog.NewTextHandler(cni.PlainWriter(stderr), &slog.HandlerOptions{Level: level}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log) // the log of client-go
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if o.AskReady {
		ctx, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		if err := probes.AskReady(ctx, o.HTTP); err != nil {
			fmt.Fprintln(stderr, "sriov-device-plugin: not ready:", err)
			return 1
		}
		return 0
	}
	o.NewDriver = newDriver
	o.RestoreVFs = func() error { return sriov.RestoreOrphans(o.Sysfs, log) }
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	if err := runDaemon(ctx, o, reload, log); err != nil {
		fmt.Fprintln(stderr, "sriov-device-plugin:", err)
		return 1
	}
	return 0
}

const ignored = "ignored: the log goes to standard error"

type commandLine struct {
	daemonOptions
	kubelet, registration, verbosity string
}

// defineFlags returns all flags with their defaults. They include those of sriov-network-device-plugin, whose manifests work unchanged.
func (c *commandLine) defineFlags(output io.Writer) *flag.FlagSet {
	f := flag.NewFlagSet("sriov-device-plugin", flag.ContinueOnError)
	f.SetOutput(output)
	f.StringVar(&c.ConfigFile, "config-file", poolfile.Default, "configuration of the pools in JSON; read again when it changes and on SIGHUP")
	f.StringVar(&c.Prefix, "resource-prefix", poolfile.DefaultPrefix, "default prefix of resource names")
	f.BoolVar(&c.UseCDI, "use-cdi", false, "pass device files by CDI annotations unless the configuration says otherwise")
	f.StringVar(&c.Host, "node-name", nodeName(), "name of this node; entries of the configuration with \"hosts\" apply if they match it")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"kubeconfig for the API server, for resources with \"api\": \"dra\"; empty for the ServiceAccount of the pod")
	f.StringVar(&c.Instance, "pod-uid", os.Getenv("POD_UID"), "UID of this pod; it lets a new version start before the old one ends")
	f.BoolVar(&c.Strict, "strict", false, "refuse a configuration with an unsupported entry, instead of serving the other entries")
	f.StringVar(&c.kubelet, "kubelet-dir", defaultKubelet, "root folder of the kubelet, with plugins_registry and pod-resources")
	f.StringVar(&c.Kubelet.Plugins, "device-plugin-dir", defaultPlugins, "folder of kubelet.sock; the kubelet has no option to move it")
	f.StringVar(&c.registration, "registration", "auto",
		"how resources are registered with the kubelet: classic, registry, or auto for registry if it exists")
	f.StringVar(&c.Sysfs, "sysfs", "/sys", "mount point of sysfs")
	f.StringVar(&c.Dev, "dev", defaultDev, "folder of the node's device files")
	f.StringVar(&c.InfoDir, "device-info-dir", defaultInfo, "folder of device-info files for Multus and similar programs; empty for none")
	f.StringVar(&c.CDIDir, "cdi-dir", defaultCDI, "folder of CDI specifications for the runtime; empty for none")
	f.StringVar(&c.Socket, "socket", poddevices.Socket,
		"unix socket that answers the sriov plugin and podlace about devices of pods; empty for none")
	f.StringVar(&c.HTTP, "http", defaultHTTP, "host:port or unix:/path that serves /healthz, /readyz and /metrics; empty for none")
	f.DurationVar(&c.Poll, "poll", defaultPoll, "interval of scanning all devices, in case an event is lost")
	f.StringVar(&c.verbosity, "log-level", "info", "debug, info, warn or error; a number above 4 means debug, as in sriov-network-device-plugin")
	f.BoolVar(&c.AskReady, "ready", false, "ask the running instance at --http whether it is ready, and exit with status 0 or 1")
	f.String("log-dir", "", ignored)
	return f
}

// parseFlags parses the arguments, and prints the reason itself if that fails.
func parseFlags(args []string, stderr io.Writer) (o daemonOptions, level slog.Level, err error) {
	var c commandLine
	f := c.defineFlags(stderr)
	// sriov-network-device-plugin has these flags of its logging library glog. They are ignored.
	for _, name := range []string{"v", "vmodule", "log_dir", "log_backtrace_at", "stderrthreshold"} {
		f.String(name, "", ignored)
	}
	for _, name := range []string{"logtostderr", "alsologtostderr"} {
		f.Bool(name, false, ignored)
	}
	version := f.Bool("version", false, "print the version and exit")
	if err := f.Parse(args); err != nil {
		return o, 0, err
	}
	if *version {
		fmt.Fprintln(stderr, "sriov-device-plugin version", cni.BuildVersion())
		return o, 0, flag.ErrHelp
	}
	if f.NArg() > 0 {
		return o, 0, complain(f, "unexpected argument %q", f.Arg(0))
	}
	if level, err = parseLevel(c.verbosity); err != nil {
		return o, 0, complain(f, "log-level %q: want debug, info, warn, error or a number", c.verbosity)
	}
	if c.Poll < time.Second {
		return o, 0, complain(f, "poll %s: want at least 1s", c.Poll)
	}
	c.Root, c.Claims = c.kubelet, claim.Folder
	c.Pods = filepath.Join(c.kubelet, "pod-resources")
	registry := filepath.Join(c.kubelet, "plugins_registry")
	switch _, err := os.Stat(registry); {
	case c.registration == "registry", c.registration == "auto" && err == nil:
		c.Kubelet.Registry = registry
	case c.registration != "classic" && c.registration != "auto":
		return o, 0, complain(f, "registration %q: want auto, classic or registry", c.registration)
	}
	return c.daemonOptions, level, nil
}

// nodeName returns the node's name from the downward API, or else the host name.
func nodeName() string {
	host, _ := os.Hostname()
	return cmp.Or(os.Getenv("NODE_NAME"), host)
}

func complain(f *flag.FlagSet, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	fmt.Fprintf(f.Output(), "%s: %v\n", f.Name(), err)
	return err
}

func parseLevel(s string) (level slog.Level, err error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n > 4 {
			return slog.LevelDebug, nil
		}
		return slog.LevelInfo, nil
	}
	err = level.UnmarshalText([]byte(s))
	return level, err
}
