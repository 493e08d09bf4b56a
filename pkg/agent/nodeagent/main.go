// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/plugin"
)

// Default values of flags.
const (
	defaultConfig  = "/etc/podlace-node/config.json"
	defaultPlugins = "/plugins"
	defaultHTTP    = "127.0.0.1:9810"
)

// memoryLimit is the Go runtime's soft memory limit in bytes, which GOMEMLIMIT overrides. With 5,000 nodes the agent needs 20 MiB.
const memoryLimit = 48 << 20

// readyTimeout is how long "podlace-node run --ready" waits for the running agent's reply.
const readyTimeout = 5 * time.Second

// exitError is an exit status that ends the program without a message.
type exitError int

// Error implements error.
func (e exitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// command holds what all subcommands share.
type command struct {
	stdout, stderr io.Writer
	level          slog.Level
}

// Main runs podlace-node with command line arguments and returns the exit status, which is 2 if the command could not run.
func Main(args []string, stdout, stderr io.Writer) int {
	stdout, stderr = plugin.PlainWriter(stdout), plugin.PlainWriter(stderr)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := Command(stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var exit exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	}
	fmt.Fprintln(stderr, "podlace-node:", err)
	return exitUnknown
}

// Command returns the root command, whose flags the documents list.
func Command(stdout, stderr io.Writer) *cobra.Command {
	c := &command{stdout: stdout, stderr: stderr}
	root := &cobra.Command{Use: "podlace-node", Short: "Routes between the nodes of a cluster, for pods on Podlace", SilenceErrors: true,
		SilenceUsage: true, Version: plugin.BuildVersion()}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.CompletionOptions.DisableDefaultCmd = true
	root.PersistentFlags().TextVar(&c.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	root.AddCommand(c.newRun(), c.newCheck(), c.newInstall(), c.newRemove(), c.newSchema(), c.newStatus())
	return root
}

func (c *command) log() *slog.Logger {
	log := slog.New(slog.NewTextHandler(c.stderr, &slog.HandlerOptions{Level: c.level}))
	slog.SetDefault(log)
	klog.SetSlogLogger(log) // of client-go
	return log
}

func (c *command) newRun() *cobra.Command {
	o := options{times: usualTimes()}
	var askReady bool
	cmd := &cobra.Command{Use: "run", Short: "Keep routes, node.json, plugins and conflist of this node", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if askReady {
				ctx, cancel := context.WithTimeout(cmd.Context(), readyTimeout)
				defer cancel()
				if err := probes.AskReady(ctx, o.HTTP); err != nil {
					fmt.Fprintln(c.stderr, "podlace-node: not ready:", err)
					return exitError(exitProblems)
				}
				return nil
			}
			if o.Node == "" {
				return errors.New("the name of this node is unknown: set NODE_NAME or --node-name")
			}
			if os.Getenv("GOMEMLIMIT") == "" {
				debug.SetMemoryLimit(memoryLimit)
			}
			log := c.log()
			log.Info("podlace-node starts", "version", plugin.BuildVersion(), "node", o.Node)
			err := run(cmd.Context(), o, log)
			if cmd.Context().Err() != nil {
				log.Info("podlace-node ends; routes and files stay")
				return nil
			}
			return err
		}}
	f := cmd.Flags()
	f.StringVar(&o.Node, "node-name", os.Getenv("NODE_NAME"), "name of this node's Node object")
	f.StringVar(&o.Config, "config", defaultConfig, "configuration file; "+conflistName+" is beside it")
	f.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig for the API server; empty: the ServiceAccount of the pod")
	f.StringVar(&o.Plugins, "plugins", defaultPlugins, "folder with the plugins to install; empty: none")
	f.StringVar(&o.HTTP, "http", defaultHTTP, "host:port or unix:/path of /healthz, /readyz and /metrics; empty: no server")
	f.BoolVar(&askReady, "ready", false, "ask the running instance at --http whether it is ready, and exit with status 0 or 1")
	return cmd
}

func (c *command) newInstall() *cobra.Command {
	var from, to string
	cmd := &cobra.Command{Use: "install", Short: "Install only the plugins", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := newBinaries(from, to)
			replaced, err := b.install()
			for _, path := range replaced {
				fmt.Fprintln(c.stdout, "installed", path)
			}
			return err
		}}
	cmd.Flags().StringVar(&from, "plugins", defaultPlugins, "folder with the plugins to install")
	cmd.Flags().StringVar(&to, "bin-dir", defaults().BinDir, "folder in which the runtime looks for plugins")
	return cmd
}

func (c *command) newRemove() *cobra.Command {
	r := removal{binDir: defaults().BinDir, confDir: defaults().ConfDir, poll: removePoll, out: c.stdout}
	cmd := &cobra.Command{Use: "remove", Short: "Remove the changes of podlace-node and the plugins from this node", Args: cobra.NoArgs,
		Long: `Remove the changes of podlace-node and the plugins from this node. The command first keeps new pods from Podlace. State that
running pods need stays until they are deleted; --wait waits for that. State of pods whose namespace is gone is removed at once.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if conf, err := readConfig(r.config); err == nil {
				r.binDir, r.confDir = flagOr(cmd, "bin-dir", conf.BinDir), flagOr(cmd, "conf-dir", conf.ConfDir)
			}
			r.log = c.log()
			err := r.run(cmd.Context())
			if r.wait && cmd.Context().Err() != nil {
				return nil
			}
			return err
		}}
	f := cmd.Flags()
	f.StringVar(&r.config, "config", defaultConfig, "configuration file, for the names of both folders; it may be missing")
	f.StringVar(&r.binDir, "bin-dir", r.binDir, "folder with the installed plugins; empty: none")
	f.StringVar(&r.confDir, "conf-dir", r.confDir, "folder with the conflist; empty: none")
	f.StringVar(&r.http, "http", defaultHTTP, "with --wait: host:port or unix:/path of /readyz, which succeeds after the removal; empty: no server")
	f.BoolVar(&r.wait, "wait", false, "wait until no pod needs Podlace, and afterwards for SIGTERM, because a container of a DaemonSet must not exit")
	return cmd
}

// flagOr returns the value of a flag, or `other` if the user has not set it.
func flagOr(cmd *cobra.Command, name, other string) string {
	if f := cmd.Flags().Lookup(name); f.Changed {
		return f.Value.String()
	}
	return other
}

func (c *command) newStatus() *cobra.Command {
	output, all := "table", false
	cmd := &cobra.Command{Use: "status", Short: "Print how this node reaches the other nodes, and its problems",
		Long: "Print how this node reaches the other nodes, and its problems. Exit status 0: no problem, 1: problems, 2: the state is unknown.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if output != "table" && output != "json" {
				return fmt.Errorf("output %q: want table or json", output)
			}
			exit, err := showStatus(c.stdout, output == "json", all)
			if err == nil && exit != exitFine {
				err = exitError(exit)
			}
			return err
		}}
	cmd.Flags().StringVarP(&output, "output", "o", output, "table or json")
	cmd.Flags().BoolVar(&all, "all", false, "list all nodes, also those without a problem")
	return cmd
}
