// SPDX-License-Identifier: Apache-2.0

// Command conformance runs Kubernetes' network e2e tests in a cluster with Podlace, and compares the results with the list of those that
// must pass (`make e2e`).
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

//go:embed specs.txt
var specs string

type options struct {
	cache, out string
	image      string
	proxy      string
	reference  bool
	focus      string
	filter     string
	processes  int
	nodes      int
	kubeconfig string
	in         string
}

func main() {
	var o options
	flag.StringVar(&o.cache, "cache", "", "`folder` of programs and images that are built once")
	flag.StringVar(&o.image, "image", "", "`name` of Podlace's image, which build/image.tar holds")
	flag.StringVar(&o.out, "out", "build/e2e", "`folder` for logs and reports")
	flag.StringVar(&o.proxy, "proxy", "nftables", "`modes` of kube-proxy, with commas between them: nftables, iptables")
	flag.BoolVar(&o.reference, "reference", false, "run the suite with the reference plugins, too, and print what differs")
	flag.StringVar(&o.focus, "focus", "", "run only specs whose names match the `expression`, and compare nothing with the list")
	flag.StringVar(&o.filter, "filter", "", "run only specs whose labels match Ginkgo's `filter`")
	flag.IntVar(&o.processes, "procs", 6, "specs that run at the same time")
	flag.IntVar(&o.nodes, "nodes", 3, "nodes of the cluster: 2 on one link, the third behind a router; the list wants 3")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "test the cluster of this `file` instead of starting one; -proxy is the mode of its kube-proxy")
	flag.StringVar(&o.in, "in", "", "`command` that runs another one where the cluster of -kubeconfig is reached")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func (o options) run(ctx context.Context) error {
	if o.cache == "" || o.image == "" || flag.NArg() > 0 {
		return errors.New("-cache or -image is missing, or there are arguments behind the flags")
	}
	lists := map[string][]string{}
	for mode := range strings.SplitSeq(o.proxy, ",") {
		list, err := readList(strings.NewReader(specs), mode)
		if err != nil {
			return err
		}
		if o.focus == "" {
			lists[mode] = list
		}
	}
	c, err := prepareCluster(ctx, o.cache)
	if err != nil {
		return err
	}
	c.image = o.image
	var lines []string
	for mode := range strings.SplitSeq(o.proxy, ",") {
		got, err := o.runOnce(ctx, c, mode, "podlace", lists[mode])
		if err != nil {
			return err
		}
		for _, line := range failuresOf(lists[mode], got) {
			lines = append(lines, mode+": "+line)
		}
		if o.reference {
			other, err := o.runOnce(ctx, c, mode, "reference", lists[mode])
			if err != nil {
				return err
			}
			printDifferences(os.Stdout, [2]string{"Podlace", "the reference plugins"}, [2]suiteReport{got, other})
		}
	}
	if len(lines) > 0 {
		return fmt.Errorf("%d specs of the list did not pass:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	return nil
}

// runOnce starts a cluster, runs the e2e tests, prints their results, and ends the cluster.
func (o options) runOnce(ctx context.Context, c testCluster, mode, plugins string, list []string) (suiteReport, error) {
	folder, err := filepath.Abs(filepath.Join(o.out, plugins+"-"+mode))
	if err != nil {
		return suiteReport{}, fmt.Errorf("folder of the report: %w", err)
	}
	if err := os.RemoveAll(folder); err != nil {
		return suiteReport{}, fmt.Errorf("folder of the report: %w", err)
	}
	s := c.suiteFor(o.kubeconfig, strings.Fields(o.in)...)
	if o.kubeconfig == "" {
		fmt.Printf("kube-proxy %s, %s: starting the cluster\n", mode, plugins)
		var down func()
		if s, down, err = c.startCluster(ctx, folder, mode, plugins, o.nodes); err != nil {
			return suiteReport{}, err
		}
		defer down()
	}
	fmt.Printf("kube-proxy %s, %s: running the tests; logs are below %s\n", mode, plugins, folder)
	start := time.Now()
	s.processes, s.nodes, s.focus, s.filter = o.processes, o.nodes, o.focus, cmp.Or(o.filter, labelFilter(mode))
	got, err := s.runSpecs(ctx, folder)
	if err != nil {
		return suiteReport{}, err
	}
	printOutcome(os.Stdout, fmt.Sprintf("kube-proxy %s, %s", mode, plugins), list, got, time.Since(start))
	return got, nil
}
