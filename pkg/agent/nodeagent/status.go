// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/store"
)

// Files of the agent: its status, and the file that it locks while it runs.
const (
	statusName = nodefile.StatusName
	lockName   = ".node.lock"
)

// Status is the content of the status file. It has no timestamps, so an unchanged status need not be written again.
type Status struct {
	Node         string         `json:"node"`
	Ready        bool           `json:"ready"`
	Routes       bool           `json:"routes"` // it restores what other programs remove, routes and rules
	PodCIDRs     []netip.Prefix `json:"podCIDRs,omitempty"`
	ClusterCIDRs []netip.Prefix `json:"clusterCIDRs,omitempty"`
	MTU          int            `json:"mtu,omitempty"`
	Peers        []PeerStatus   `json:"peers,omitempty"`
	Problems     []Problem      `json:"problems,omitempty"`
}

// PeerStatus holds the fields of a noderoutes.Peer for the status file.
type PeerStatus struct {
	Name    string           `json:"name"`
	PodCIDR netip.Prefix     `json:"podCIDR,omitzero"`
	Gateway netip.Addr       `json:"gateway,omitzero"`
	State   noderoutes.State `json:"state"`
	Reason  string           `json:"reason,omitempty"`
	Answers string           `json:"answers,omitempty"` // whether its gateway address does: yes, no, or empty before the first answer

	elder bool   // the peer has this node's podCIDR, which is a problem of the own node
	do    string // the remedy, if it is more specific than the remedy of the state
}

// Problem says what is affected, why, and what an administrator can do.
type Problem struct {
	What string `json:"what"`
	Why  string `json:"why"`
	Do   string `json:"do,omitempty"`

	blocking bool // it keeps pods from starting here
}

func peerProblems(peers []PeerStatus) (list []Problem) {
	do := map[noderoutes.State]string{
		noderoutes.Refused:  "correct the Node object or the configuration (offLink, addressCIDRs)",
		noderoutes.Conflict: "delete the younger Node object (kubectl delete node %s), and restart its kubelet",
		noderoutes.Silent:   "check links and firewalls between both nodes, and run podlace doctor on %s",
		noderoutes.Failed:   "nothing: the agent tries again",
	}
	for _, p := range peers {
		if advice, bad := do[p.State]; bad && !p.elder {
			what := "node " + p.Name
			if p.PodCIDR.IsValid() {
				what += " " + p.PodCIDR.String()
			}
			advice = cmp.Or(p.do, strings.ReplaceAll(advice, "%s", p.Name))
			list = append(list, Problem{What: what, Why: string(p.State) + ": " + p.Reason, Do: advice})
		}
	}
	return list
}

// statusFile writes the status file at most once per second, and only if the status changed.
type statusFile struct {
	written time.Time
	text    []byte
}

// write writes the status if the last write was long enough ago. Otherwise it returns when to call it again; that is zero if the file is up
// to date.
func (f *statusFile) write(s Status, now time.Time) (again time.Time, err error) {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return time.Time{}, err
	}
	if _, missing := os.Lstat(filepath.Join(store.Root, statusName)); missing == nil && bytes.Equal(text, f.text) {
		return time.Time{}, nil
	}
	if next := f.written.Add(time.Second); now.Before(next) {
		return next, nil
	}
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return time.Time{}, err
	}
	defer dir.Close()
	if there, err := dir.Read(statusName); err != nil || !bytes.Equal(there, text) {
		if err := dir.Write(statusName, text, 0o600); err != nil {
			return time.Time{}, err
		}
	}
	f.written, f.text = now, text
	return time.Time{}, nil
}

// Exit statuses of podlace-node status.
const (
	exitFine     = 0
	exitProblems = 1
	exitUnknown  = 2
)

// showStatus prints the agent's status file and returns the exit status.
func showStatus(w io.Writer, asJSON, all bool) (exit int, err error) {
	var s Status
	var text []byte
	dir, err := store.Open(store.Root)
	if err == nil {
		defer dir.Close()
		if text, err = dir.Read(statusName); err == nil {
			err = json.Unmarshal(text, &s)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return exitUnknown, fmt.Errorf("podlace-node has not run here since the node started, or its files were removed: %w", err)
	}
	if err != nil {
		return exitUnknown, fmt.Errorf("read the status: %w", err)
	}
	if lock, err := dir.Lock(0, lockName, 0o600); err == nil {
		lock.Unlock()
		s.Problems = append([]Problem{{What: "agent", Why: "podlace-node is not running: this node misses changes of the cluster",
			Do: "start its pod or its service"}}, s.Problems...)
	}
	if asJSON {
		if text, err = json.MarshalIndent(s, "", "  "); err == nil {
			_, err = fmt.Fprintf(w, "%s\n", text)
		}
	} else {
		err = printStatus(w, s, all)
	}
	if len(s.Problems) > 0 || !s.Ready {
		return exitProblems, err
	}
	return exitFine, err
}

func printStatus(w io.Writer, s Status, all bool) error {
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	ready := "ready"
	if !s.Ready {
		ready = "NOT READY: the problems below keep pods from starting on Podlace"
	}
	fmt.Fprintf(t, "node\t%s, %s\n", s.Node, ready)
	fmt.Fprintf(t, "pods\t%s\n", orNone(s.PodCIDRs))
	fmt.Fprintf(t, "cluster\t%s\n", orNone(s.ClusterCIDRs))
	if s.MTU > 0 {
		fmt.Fprintf(t, "mtu\t%d\n", s.MTU)
	}
	count := map[noderoutes.State]int{}
	var names []string // sorted, like the peers
	for _, p := range s.Peers {
		count[p.State]++
		names = append(names, p.Name)
	}
	peers := "none"
	for _, state := range states() {
		if n := count[state]; n > 0 {
			peers = strings.TrimPrefix(peers+fmt.Sprintf(", %d %s", n, state), "none, ")
		}
	}
	if nodes := len(slices.Compact(names)); nodes > 0 {
		peers = fmt.Sprintf("%d nodes; podCIDRs: %s", nodes, peers)
	}
	fmt.Fprintf(t, "peers\t%s\n", peers)
	if all && len(s.Peers) > 0 {
		fmt.Fprintln(t, "\nNODE\tPODCIDR\tADDRESS\tSTATE\tANSWERS\tREASON")
		for _, p := range s.Peers {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", p.Name, text(p.PodCIDR.IsValid(), p.PodCIDR), text(p.Gateway.IsValid(), p.Gateway),
				p.State, cmp.Or(p.Answers, "-"), p.Reason)
		}
	}
	if len(s.Problems) > 0 {
		fmt.Fprintln(t, "\nPROBLEM\tWHY\tWHAT TO DO")
		for _, p := range s.Problems {
			fmt.Fprintf(t, "%s\t%s\t%s\n", p.What, p.Why, p.Do)
		}
	}
	return t.Flush()
}

// states returns all states of peers, those with a working connection first.
func states() []noderoutes.State {
	return []noderoutes.State{noderoutes.Direct, noderoutes.Tunneled, noderoutes.Fabric, noderoutes.Refused, noderoutes.Conflict,
		noderoutes.Silent, noderoutes.Failed}
}

func text(valid bool, v fmt.Stringer) string {
	if !valid {
		return "-"
	}
	return v.String()
}

func orNone(list []netip.Prefix) string {
	var texts []string
	for _, p := range list {
		texts = append(texts, p.String())
	}
	if len(texts) == 0 {
		return "none"
	}
	return strings.Join(texts, " ")
}

// blocked returns the problems that keep pods from starting.
func blocked(problems []Problem) []Problem {
	return slices.DeleteFunc(slices.Clone(problems), func(p Problem) bool { return !p.blocking })
}

// logProblems logs this node's new problems and the end of old ones. Those of peers are logged by setPeers.
func (a *agent) logProblems() {
	has := func(list []Problem, p Problem) bool {
		return slices.ContainsFunc(list, func(q Problem) bool { return q.What == p.What && q.Why == p.Why })
	}
	for _, p := range a.problems {
		// These are logged where they are detected.
		elsewhere := p.What == "configuration" || p.What == "API server" || p.What == "nodes" && a.deletionsHeld
		if !elsewhere && !has(a.logged, p) {
			a.log.Warn("a problem of this node", "what", p.What, "why", p.Why, "do", p.Do, "podsCanStart", !p.blocking)
		}
	}
	for _, p := range a.logged {
		sameWhat := func(q Problem) bool { return q.What == p.What }
		if !slices.ContainsFunc(a.problems, sameWhat) {
			a.log.Info("a problem of this node has ended", "what", p.What, "why", p.Why)
		}
	}
	a.logged = slices.Clone(a.problems)
}
