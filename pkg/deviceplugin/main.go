// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
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

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	cni "github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/probes"
	"github.com/podlace/podlace/pkg/sriov"
)

// Where a node has what, unless flags say otherwise.
const (
	defaultConfig  = "/etc/pcidp/config.json"
	defaultPrefix  = "intel.com"
	defaultKubelet = "/var/lib/kubelet"
	defaultPlugins = "/var/lib/kubelet/device-plugins"
	defaultDev     = "/dev"
	defaultInfo    = "/var/run/k8s.cni.cncf.io/devinfo/dp"
	defaultCDI     = "/var/run/cdi"
	defaultHTTP    = "127.0.0.1:9809"
	defaultPoll    = time.Minute
)

// readyTimeout is how long the instance that is asked may take to say whether it is ready.
const readyTimeout = 5 * time.Second

// Main runs the device plugin with the arguments of its command line, until it is told to end by SIGINT or SIGTERM, and returns the exit
// status: 2 for wrong arguments, 1 when it could not start.
func Main(args []string, stderr io.Writer) int {
	o, level, err := parseFlags(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	log := slog.New(slog.NewTextHandler(cni.PlainWriter(stderr), &slog.HandlerOptions{Level: level}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log) // of client-go
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
	o.Return = func() error { return sriov.Return(o.Sysfs, log) }
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	if err := runDaemon(ctx, o, reload, log); err != nil {
		fmt.Fprintln(stderr, "sriov-device-plugin:", err)
		return 1
	}
	return 0
}

const ignored = "ignored: the log goes to standard error"

// commandLine is what the flags say.
type commandLine struct {
	settings
	kubelet, registration, verbosity string
}

// flags returns all flags with their defaults. It knows those of sriov-network-device-plugin, so that its manifests work.
func (c *commandLine) flags(output io.Writer) *flag.FlagSet {
	f := flag.NewFlagSet("sriov-device-plugin", flag.ContinueOnError)
	f.SetOutput(output)
	f.StringVar(&c.ConfigFile, "config-file", defaultConfig, "the pools, in JSON; read again when it changes and on SIGHUP")
	f.StringVar(&c.Prefix, "resource-prefix", defaultPrefix, "of resources whose pool names none")
	f.BoolVar(&c.UseCDI, "use-cdi", false, "hand device files over by CDI, in annotations, where the configuration does not say")
	f.StringVar(&c.Host, "node-name", nodeName(), "name of this node, by which entries of the configuration count here or not")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"how resources with \"api\": \"dra\" reach the API server; empty for the ServiceAccount of the pod")
	f.StringVar(&c.Instance, "pod-uid", os.Getenv("POD_UID"), "UID of this pod, so that a new version can start before the old one ends")
	f.BoolVar(&c.Strict, "strict", false, "refuse a configuration with an entry that is not supported, instead of serving the others")
	f.StringVar(&c.kubelet, "kubelet-dir", defaultKubelet, "the kubelet's root, with plugins_registry and pod-resources")
	f.StringVar(&c.Kubelet.Plugins, "device-plugin-dir", defaultPlugins, "the folder of kubelet.sock, which no setting of the kubelet moves")
	f.StringVar(&c.registration, "registration", "auto",
		"how the kubelet learns of resources: classic, registry, or auto for the registry if there is one")
	f.StringVar(&c.Sysfs, "sysfs", "/sys", "where sysfs is mounted")
	f.StringVar(&c.Dev, "dev", defaultDev, "where the node's device files are")
	f.StringVar(&c.InfoDir, "device-info-dir", defaultInfo, "where Multus and others look for device-info files; empty for none")
	f.StringVar(&c.CDIDir, "cdi-dir", defaultCDI, "where the runtime looks for CDI specifications; empty for none")
	f.StringVar(&c.Socket, "socket", allocation.Socket,
		"where the sriov plugin and podlace ask which pod has which devices; empty for nowhere")
	f.StringVar(&c.HTTP, "http", defaultHTTP, "host:port or unix:/path of /healthz, /readyz and /metrics; empty for none")
	f.DurationVar(&c.Poll, "poll", defaultPoll, "how often all devices are looked at, should an event be lost")
	f.StringVar(&c.verbosity, "log-level", "info", "debug, info, warn or error; a number above 4 is debug, as for sriov-network-device-plugin")
	f.BoolVar(&c.AskReady, "ready", false, "ask the instance that answers at --http whether it is ready, and end: exit status 0 or 1")
	f.String("log-dir", "", ignored)
	return f
}

// parseFlags has told what is wrong when it fails.
func parseFlags(args []string, stderr io.Writer) (o settings, level slog.Level, err error) {
	var c commandLine
	f := c.flags(stderr)
	// of glog, which sriov-network-device-plugin uses
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
	return c.settings, level, nil
}

// nodeName is that of the downward API, or the machine's.
func nodeName() string {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name
	}
	name, _ := os.Hostname()
	return name
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
