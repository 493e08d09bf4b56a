// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
)

const topHelp = `Show the traffic of the pods on this node, from the pods' view, against their limits.
The command reads the kernel's counters of the host interfaces and of the limits
twice. DROPS counts the packets that a limit or an interface dropped. The command does
not show VFs: their traffic passes no interface of the node.

On a terminal the table is redrawn at each interval, until Ctrl-C. Otherwise, and
with --once, it is printed once.`

const topExample = `  podlace top
  podlace top --sort drops --interval 5s
  podlace top --once -o json`

// traffic is the measured traffic of one attachment in an interval.
type traffic struct {
	attachment.Key
	Pod     string `json:"pod,omitempty"`
	Ingress flow   `json:"ingress"`
	Egress  flow   `json:"egress"`
}

// flow is the measured traffic in one direction.
type flow struct {
	Rate    uint64 `json:"rate"`            // bits per second
	Packets uint64 `json:"packets"`         // per second
	Dropped uint64 `json:"dropped"`         // packets in the interval
	Limit   uint64 `json:"limit,omitempty"` // bits per second
}

// counters holds a host interface's counters by their names in sysfs. rx and tx are as the node sees them.
type counters map[string]uint64

type topFlags struct {
	confFlags
	interval time.Duration
	sort     string
	once     bool
}

// topOrder returns the comparison for a value of --sort. Rows with the same figure are sorted by pod.
func topOrder(by string) func(a, b traffic) int {
	figure := func(t traffic) uint64 {
		return map[string]uint64{"ingress": t.Ingress.Rate, "egress": t.Egress.Rate, "total": t.Ingress.Rate + t.Egress.Rate,
			"drops": t.Ingress.Dropped + t.Egress.Dropped}[by] // 0 for "pod"
	}
	return func(a, b traffic) int { return cmp.Or(cmp.Compare(figure(b), figure(a)), cmp.Compare(a.Pod, b.Pod)) }
}

func newTop() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:     "top",
		Short:   "Show the traffic of pods against their limits",
		Long:    topHelp,
		Example: topExample,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&f.interval, "interval", time.Second, "time to measure")
	f.sort = "total"
	addChoice(cmd, &f.sort, "sort", "", "order", "total", "ingress", "egress", "drops", "pod")
	cmd.Flags().BoolVar(&f.once, "once", false, "print the table once")
	return cmd
}

func (f topFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := checkInterval(f.interval); err != nil {
		return err
	}
	live := !f.once && f.output == outputTable && isTerminal(os.Stdout) && os.Getenv("TERM") != "dumb"
	for {
		list, damaged, err := f.measure(ctx, stderr)
		if errors.Is(err, context.Canceled) {
			return printDamaged(stderr, damaged)
		}
		if err != nil {
			return err
		}
		slices.SortStableFunc(list, topOrder(f.sort))
		if live {
			fmt.Fprint(os.Stdout, "\x1b[H\x1b[2J") // os.Stdout directly: stdout would strip the escape sequence
		}
		err = printAs(f.output, stdout, list, func() { printTraffic(stdout, list) })
		if err != nil || !live {
			return errors.Join(err, printDamaged(stderr, damaged))
		}
	}
}

// measure returns the traffic of all live attachments with an interface on the node, and the unreadable records.
func (f topFlags) measure(ctx context.Context, stderr io.Writer) (list []traffic, damaged []attachment.Damaged, err error) {
	all, damaged, err := f.read(stderr)
	if err != nil {
		return nil, nil, err
	}
	all = slices.DeleteFunc(all, func(a *reconcile.Attachment) bool {
		return a.HostInterface == "" || a.State != reconcile.Alive
	})
	before := map[string]counters{}
	for _, a := range all {
		if before[a.HostInterface], err = readCounters(a.HostInterface); err != nil {
			printLine(stderr, fmt.Sprintf("%s is not shown: %v", podName(a), err))
		}
	}
	dropsBefore, bypasses, err := limitDrops()
	if err != nil {
		return nil, nil, err
	}
	for _, line := range bypasses {
		printLine(stderr, line)
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return nil, damaged, ctx.Err()
	case <-time.After(f.interval):
	}
	took := time.Since(began)
	dropsAfter, _, err := limitDrops()
	if err != nil {
		return nil, nil, err
	}
	list = []traffic{}
	for _, a := range all {
		if after, err := readCounters(a.HostInterface); err == nil { // otherwise the pod has just ended
			key := a.Key()
			list = append(list, trafficOf(a, before[a.HostInterface], after, took).addDrops(dropsBefore[key], dropsAfter[key]))
		}
	}
	return list, damaged, nil
}

// limitDrops returns the packets that each attachment's limits have dropped. The interface's counters lack them, because its queue drops
// them. bypasses has a line for each egress limit that another program's filter may switch off.
func limitDrops() (drops map[attachment.Key]bandwidth.Both[uint32], bypasses []string, err error) {
	records, err := attachment.AllOf("bandwidth")
	if err != nil || len(records) == 0 {
		return nil, nil, err
	}
	host, err := kernel.Host()
	if err != nil {
		return nil, nil, err
	}
	defer host.Close()
	list, err := bandwidth.Read(host, records)
	drops = map[attachment.Key]bandwidth.Both[uint32]{}
	droppedBy := func(d *bandwidth.Direction) uint32 {
		if d == nil || d.Applied == nil {
			return 0
		}
		return d.Applied.Dropped
	}
	for _, l := range list {
		if l.Egress != nil && l.Egress.Bypass != "" {
			bypasses = append(bypasses, fmt.Sprintf("egress of container %s, %s: %s", l.ContainerID, l.IfName, l.Egress.Bypass))
		}
		drops[l.Key] = bandwidth.Both[uint32]{Ingress: droppedBy(l.Ingress), Egress: droppedBy(l.Egress)}
	}
	return drops, bypasses, err
}

// addDrops adds the packets that the bandwidth limits dropped in the interval.
func (t traffic) addDrops(before, after bandwidth.Both[uint32]) traffic {
	t.Ingress.Dropped += uint64(after.Ingress - min(before.Ingress, after.Ingress)) // less than before: the limit was recreated
	t.Egress.Dropped += uint64(after.Egress - min(before.Egress, after.Egress))
	return t
}

// readCounters reads the counters of an interface from sysfs (Documentation/ABI/testing/sysfs-class-net-statistics).
func readCounters(link string) (counters, error) {
	c := counters{}
	for _, name := range []string{"rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_dropped", "tx_dropped"} {
		text, err := os.ReadFile(filepath.Join("/sys/class/net", link, "statistics", name))
		if err == nil {
			c[name], err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

// trafficOf converts the host side's counters into what the pod receives and sends.
func trafficOf(a *reconcile.Attachment, before, after counters, took time.Duration) traffic {
	more := func(name string) uint64 { return after[name] - min(before[name], after[name]) } // less than before: the interface was recreated
	flowOf := func(direction string, limit uint64) flow {
		return flow{uint64(float64(8*more(direction+"_bytes")) / took.Seconds()), uint64(float64(more(direction+"_packets")) / took.Seconds()),
			more(direction + "_dropped"), limit}
	}
	return traffic{a.Key(), a.Pod, flowOf("tx", a.IngressRate), flowOf("rx", a.EgressRate)}
}

func printTraffic(w io.Writer, list []traffic) {
	rows := [][]string{append(nameHeads(), "INGRESS", "LIMIT", "USED", "DROPS", "EGRESS", "LIMIT", "USED", "DROPS")}
	for _, row := range list {
		cells := nameCells(row.Key, row.Pod)
		for _, f := range []flow{row.Ingress, row.Egress} {
			cells = append(cells, formatRate(roundRate(f.Rate)), dash(limit(f.Limit)), f.usedPercent(), fmt.Sprint(f.Dropped))
		}
		rows = append(rows, cells)
	}
	printTable(w, rows)
}

// usedPercent returns the rate as a percentage of the limit.
func (f flow) usedPercent() string {
	if f.Limit == 0 {
		return "-"
	}
	return fmt.Sprintf("%d%%", f.Rate*100/f.Limit)
}
