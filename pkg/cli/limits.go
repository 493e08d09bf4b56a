// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

const limitsHelp = `Show the limits of all pods or of one: the requested rate, the rate in the kernel,
and the measured traffic. POD is namespace/name, a name, or a container ID or its
first 6 or more characters. Ingress is what the pod receives, egress is what it sends.

ASKED is what the runtime or the configuration wants, or an admin set with this command
(by admin). APPLIED, BURST and QUEUE are what the kernel has. APPLIED is "missing" if
another program removed the limit (standard error names what), "none" if an admin did,
and "gone" if the pod is. QUEUE "fair" gives each flow its own queue. WAITING is what the
queue holds at the end.

With --ingress or --egress the command changes the limits of one pod in place; the
pod stays limited meanwhile. A rate has the form of the annotations: 20M is
20,000,000 bits per second, from 1k to 100G; none removes the limit. The change lasts
until the pod ends or its runtime sets limits again. A pod without limits gets none.

The exit status is 0 if all limits are in place, 1 if one is missing, and 2 if the
command could not run.`

// minInterval is the shortest interval with enough packets for a measurement.
const minInterval = 10 * time.Millisecond

// shortestID is how many characters of a container ID are needed at least.
const shortestID = 6

type limitsFlags struct {
	ingress, egress string
	ifname          string
	interval        time.Duration
	output          string
}

func newLimits() *cobra.Command {
	var flags limitsFlags
	cmd := &cobra.Command{
		Use:     "limits [POD]",
		Example: "  podlace limits\n  podlace limits default/web-0\n  podlace limits default/web-0 --ingress 20M --egress none",
		Short:   "Show the requested, applied and measured limits of pods, or change those of one",
		Long:    limitsHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.run(cmd, args)
		},
	}
	cmd.Flags().StringVar(&flags.ingress, "ingress", "", "change what the pod may receive: a rate such as 20M, or none")
	cmd.Flags().StringVar(&flags.egress, "egress", "", "change what the pod may send: a rate such as 20M, or none")
	cmd.Flags().StringVar(&flags.ifname, "ifname", "", "only this interface of the pod")
	cmd.Flags().DurationVar(&flags.interval, "interval", time.Second, "time to measure")
	addOutput(cmd, &flags.output)
	return cmd
}

func checkInterval(interval time.Duration) error {
	if interval < minInterval {
		return fmt.Errorf("--interval %s: want at least %s", interval, minInterval)
	}
	return nil
}

func (f limitsFlags) run(cmd *cobra.Command, args []string) error {
	ingress, ingressErr := parseRate(cmd, "ingress", f.ingress)
	egress, egressErr := parseRate(cmd, "egress", f.egress)
	if err := errors.Join(ingressErr, egressErr, checkInterval(f.interval)); err != nil {
		return err
	}
	change := ingress != nil || egress != nil
	if change && len(args) == 0 {
		return errors.New("--ingress and --egress need a POD")
	}
	all, damaged, err := attachment.Scan()
	if err != nil {
		return err
	}
	records, err := f.selectRecords(all, args)
	if err != nil {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	if change {
		if records, err = selectOne(records); err != nil {
			return err
		}
		if err := bandwidth.Set(host, records[0].Key, ingress, egress); err != nil {
			return fmt.Errorf("the limits of %s are unchanged: %w", nameOf(records[0]), err)
		}
	}
	err = f.show(cmd.Context(), host, records, cmd.OutOrStdout(), cmd.ErrOrStderr())
	if len(args) > 0 {
		return err
	}
	return errors.Join(printDamaged(cmd.ErrOrStderr(), damaged), err)
}

// parseRate parses the rate in a flag, or returns nil if it was not given.
func parseRate(cmd *cobra.Command, name, text string) (*uint64, error) {
	if !cmd.Flags().Changed(name) {
		return nil, nil
	}
	value, err := bandwidth.ParseRate(text)
	if err != nil {
		return nil, fmt.Errorf("--%s %w", name, err)
	}
	return &value, nil
}

// selectRecords returns the records of the selected limits, always in the same order.
func (f limitsFlags) selectRecords(all []attachment.Record, args []string) (_ []attachment.Record, err error) {
	slices.SortFunc(all, func(a, b attachment.Record) int {
		return slices.Compare([]string{a.Network, a.Pod, a.ContainerID, a.IfName}, []string{b.Network, b.Pod, b.ContainerID, b.IfName})
	})
	if len(args) > 0 {
		if all, err = recordsOfPod(all, args[0]); err != nil {
			return nil, err
		}
	}
	all = slices.DeleteFunc(all, func(rec attachment.Record) bool { return f.ifname != "" && rec.IfName != f.ifname })
	if len(args) > 0 && len(all) == 0 {
		return nil, fmt.Errorf("no record of %s has the interface %s", args[0], f.ifname)
	}
	chosen := bandwidth.Records(all)
	if len(args) > 0 && len(chosen) == 0 {
		for _, rec := range all {
			if _, err := attachment.RecordsOf(rec.Key, "bandwidth"); err != nil {
				return nil, err
			}
		}
		return nil, fmt.Errorf("%s has no limits: recreate the pod with the annotations "+
			"kubernetes.io/ingress-bandwidth and kubernetes.io/egress-bandwidth", nameOf(all[0]))
	}
	return chosen, nil
}

// recordsOfPod returns all records of one pod, which may have several containers of its name, because an old one may still be ending.
func recordsOfPod(all []attachment.Record, name string) ([]attachment.Record, error) {
	match := func(rec attachment.Record) bool {
		return rec.ContainerID == name || rec.Pod != "" && strings.HasSuffix("/"+rec.Pod, "/"+name)
	}
	switch {
	case !slices.ContainsFunc(all, match) && len(name) >= shortestID:
		match = func(rec attachment.Record) bool { return strings.HasPrefix(rec.ContainerID, name) }
	}
	found := slices.DeleteFunc(all, func(rec attachment.Record) bool { return !match(rec) })
	pods := map[string]bool{}
	for _, rec := range found {
		pods[nameOf(rec)] = true
	}
	switch len(pods) {
	case 0:
		return nil, fmt.Errorf("no pod %s is recorded on this node: want namespace/name, a name, or a container ID or its first %d or more characters",
			name, shortestID)
	case 1:
		return found, nil
	}
	return nil, fmt.Errorf("%s may be %s", name, strings.Join(slices.Sorted(maps.Keys(pods)), " or "))
}

func nameOf(rec attachment.Record) string {
	if rec.Pod != "" {
		return "pod " + rec.Pod
	}
	return "container " + rec.ContainerID
}

// selectOne returns the live attachment whose limits should change, or an error if there are several.
func selectOne(records []attachment.Record) ([]attachment.Record, error) {
	live := slices.DeleteFunc(slices.Clone(records), func(rec attachment.Record) bool { return plugin.NetnsGone(rec.Netns) })
	if len(live) == 0 {
		return nil, fmt.Errorf("%s has ended: its network namespace is gone, and its limits with it", nameOf(records[0]))
	}
	if len(live) == 1 {
		return live, nil
	}
	var names []string
	for _, rec := range live {
		names = append(names, fmt.Sprintf("%s of container %s in network %s", rec.IfName, rec.ContainerID, rec.Network))
	}
	return nil, fmt.Errorf("%s has several limited interfaces: select one with --ifname, or by the container ID: %s", nameOf(live[0]),
		strings.Join(names, ", "))
}

func (f limitsFlags) show(ctx context.Context, host *kernel.Node, records []attachment.Record, stdout, stderr io.Writer) error {
	list, err := bandwidth.Look(ctx, host, records, f.interval)
	if err != nil {
		return err
	}
	err = printAs(f.output, stdout, list, func() { printLimits(stdout, stderr, list) })
	if err == nil && slices.ContainsFunc(list, bandwidth.Limits.Missing) {
		return exitError(exitDiffers)
	}
	return err
}

func printLimits(stdout, stderr io.Writer, list []bandwidth.Limits) {
	rows := [][]string{append(nameHeads(), "LIMIT", "ASKED", "APPLIED", "BURST", "QUEUE", "MEASURED", "DROPPED", "WAITING")}
	for _, l := range list {
		for _, d := range []struct {
			name string
			*bandwidth.Direction
		}{{"ingress", l.Ingress}, {"egress", l.Egress}} {
			if d.Direction == nil {
				continue
			}
			cells := append(nameCells(l.Key, l.Pod), d.name, requestedText(d.Asked))
			rows = append(rows, append(cells, appliedCells(d.Direction, l.Gone)...))
			if d.Missing != "" {
				remedy := map[bool]string{true: "delete the pod, which gets no new link", false: "podlace reload restores it"}[l.Deleted]
				printLine(stderr, fmt.Sprintf("%s of container %s, %s: %s: %s", d.name, l.ContainerID, l.IfName, d.Missing, remedy))
			}
			if d.Bypass != "" {
				printLine(stderr, fmt.Sprintf("%s of container %s, %s: %s", d.name, l.ContainerID, l.IfName, d.Bypass))
			}
		}
	}
	printTable(stdout, rows)
}

func requestedText(a bandwidth.Limit) string {
	text := dash(limit(a.Rate))
	if a.ByAdmin {
		text = map[bool]string{true: "none", false: text}[a.Rate == 0] + " by admin"
	}
	return text
}

// appliedCells returns the table cells about the limit in the kernel.
func appliedCells(d *bandwidth.Direction, gone bool) []string {
	if d.Applied == nil {
		text := "none"
		switch {
		case gone:
			text = "gone"
		case d.Missing != "":
			text = "missing"
		}
		return []string{text, "-", "-", "-", "-", "-"}
	}
	queue := inBytes(d.Applied.Limit)
	if d.Applied.Fair.Packets > 0 {
		queue = "fair"
	}
	return []string{formatRate(d.Applied.Rate), inBytes(d.Applied.Burst), queue,
		formatRate(roundRate(d.Rate)), fmt.Sprint(d.Dropped), inBytes(d.Applied.Waiting)}
}

func inBytes(n uint32) string { return fmt.Sprintf("%d B", n) }

// formatRate formats a rate in the largest unit with a number of at least 1.
func formatRate(rate uint64) string {
	unit, name := uint64(1), ""
	for _, larger := range []string{"k", "M", "G"} {
		if rate < unit*1000 {
			break
		}
		unit, name = unit*1000, larger
	}
	return strconv.FormatFloat(float64(rate)/float64(unit), 'f', -1, 64) + name + "bit/s"
}

// roundRate rounds a measured rate to three digits.
func roundRate(rate uint64) uint64 {
	step := uint64(1)
	for rate/step >= 1000 {
		step *= 10
	}
	return (rate + step/2) / step * step
}
