// SPDX-License-Identifier: Apache-2.0

package kubeletnode

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// Results of the code of Kubernetes v1.37.0 (Topology Manager, device manager and static CPU policy) for 500 random sets of hints, and for
// random pods on 64 random nodes, recorded by integration/sim/oracle in commit 79b40d7.
type (
	recording struct {
		Kubernetes string
		Merges     []recordedMerge
		Nodes      []recordedNode
	}
	recordedMerge struct {
		Policy  kubelet.Policy
		Machine kubelet.Mask
		Lists   [][]recordedHint
		Best    recordedHint
		Admit   bool
	}
	recordedNode struct {
		Policy   kubelet.Policy
		PodScope bool
		Machine  int
		Near     []kubelet.Mask
		CPUs     int
		Plugin   string
		Steps    []recordedStep
	}
	recordedStep struct {
		Gone             []int
		Healthy          string
		Init, Containers [][2]int
		Lists            [][][]recordedHint
		Hints            []recordedHint
		Asked            []recordedQuestion
		Reason           string
		VFs, Taken       [][]int
	}
	recordedQuestion struct {
		Available, Must []int
		Size            int
	}
	recordedHint uint64
)

func record(h kubelet.Hint) recordedHint {
	out := recordedHint(h.Nodes) << 1
	if h.Preferred {
		out |= 1
	}
	return out
}

func recordLists(lists [][]kubelet.Hint) [][]recordedHint {
	out := [][]recordedHint{}
	for _, list := range lists {
		var hints []recordedHint
		if list != nil {
			hints = []recordedHint{}
		}
		for _, h := range list {
			hints = append(hints, record(h))
		}
		out = append(out, hints)
	}
	return out
}

func (h recordedHint) hint() kubelet.Hint {
	return kubelet.Hint{Nodes: kubelet.Mask(h >> 1), Preferred: h&1 == 1}
}

func readRecording(t *testing.T) recording {
	t.Helper()
	f, err := os.Open("testdata/recording.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	in, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var r recording
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRecording compares this package and pkg/cli/kubelet with the recorded results of Kubernetes: hints, merged hints, requests to the
// plugin, reasons and devices. Pick returns the recorded devices where Kubernetes chose in random order.
func TestRecording(t *testing.T) {
	r := readRecording(t)
	for i, m := range r.Merges {
		lists := make([][]kubelet.Hint, len(m.Lists))
		for j, list := range m.Lists {
			if list != nil {
				lists[j] = []kubelet.Hint{}
			}
			for _, h := range list {
				lists[j] = append(lists[j], h.hint())
			}
		}
		best, admit := kubelet.Merge(m.Policy, m.Machine, lists)
		if record(best) != m.Best || admit != m.Admit {
			t.Fatalf("pkg/cli/kubelet merges hints unlike Kubernetes, whose recorded results stay: correct Merge: merge %d, %s of %v: %s, %v, want %s, %v",
				i, m.Policy, m.Lists, best.String(), admit, m.Best.hint().String(), m.Admit)
		}
	}
	seen := map[string]int{}
	for i, n := range r.Nodes {
		replayed := replay{t: t, recordedNode: n, seen: seen, grants: make([]Grant, len(n.Steps))}
		replayed.node = Node{Policy: n.Policy, PodScope: n.PodScope, VFs: kubelet.NewDevices(1<<n.Machine-1, n.Near), Pick: replayed.pickRecorded}
		replayed.node.trace = trace{replayed.lists, func(i int) { replayed.container = i }}
		if n.CPUs > 0 {
			replayed.node.CPUs = NewCPUs(1<<n.Machine-1, n.CPUs)
		}
		if n.Plugin != "silent" {
			replayed.node.Prefer = replayed.preferRecorded
		}
		for number := range n.Steps {
			if diff := replayed.runStep(number); diff != "" {
				t.Fatalf("integration/kubeletnode admits pods unlike Kubernetes, whose recorded results stay: correct Node: "+
					"node %d, %s, pods as a whole %v, near %v, %d CPUs, pod %d: want - got +\n%s", i, n.Policy, n.PodScope, n.Near, n.CPUs, number, diff)
			}
		}
	}
	t.Logf("Kubernetes %s: %d merges, %d nodes, %v", r.Kubernetes, len(r.Merges), len(r.Nodes), seen)
	for _, what := range []string{"TopologyAffinityError", "UnexpectedAdmissionError", "admitted", "asked", "picked"} {
		if seen[what] < 20 {
			t.Errorf("%s: seen %d times only", what, seen[what])
		}
	}
}

// A replay admits and removes the pods of one recorded node again.
type replay struct {
	recordedNode
	t         *testing.T
	node      Node
	grants    []Grant
	container int
	want, got recordedStep
	seen      map[string]int
}

// runStep admits or removes one recorded pod again, and returns the differences from the recorded result.
func (r *replay) runStep(number int) string {
	r.want, r.got = r.Steps[number], recordedStep{}
	for _, gone := range r.want.Gone {
		r.node.Remove(r.grants[gone])
	}
	for i, c := range r.want.Healthy {
		r.node.VFs.Healthy[i] = c == '1'
	}
	var pod Pod
	for _, c := range r.want.Init {
		pod.Init = append(pod.Init, Request{c[0], c[1]})
	}
	for _, c := range r.want.Containers {
		pod.Containers = append(pod.Containers, Request{c[0], c[1]})
	}
	g, err := r.node.admit(pod)
	r.grants[number] = g
	switch {
	case errors.Is(err, ErrAffinity):
		r.got.Reason = "TopologyAffinityError"
	case err != nil:
		r.got.Reason = "UnexpectedAdmissionError"
	default:
		r.seen["admitted"]++
	}
	r.seen[r.got.Reason]++
	r.seen["asked"] += len(r.got.Asked)
	if err != nil {
		r.node.Remove(g)
	}
	// if Admit failed before it reached a container, the container has no result
	all := len(pod.Init) + len(pod.Containers)
	r.got.Hints, r.got.VFs, r.got.Taken = make([]recordedHint, all), make([][]int, all), make([][]int, all)
	for i, h := range g.Hints {
		r.got.Hints[i] = record(h)
	}
	copy(r.got.VFs, g.VFs)
	copy(r.got.Taken, g.CPUs)
	r.got.Gone, r.got.Healthy, r.got.Init, r.got.Containers = r.want.Gone, r.want.Healthy, r.want.Init, r.want.Containers
	// Lists is compared separately, because a nil list of hints differs from an empty one.
	return cmp.Diff(r.want.Lists, r.got.Lists) + cmp.Diff(r.want, r.got, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(recordedStep{}, "Lists"))
}

func (r *replay) lists(lists [][]kubelet.Hint) { r.got.Lists = append(r.got.Lists, recordLists(lists)) }

// pickRecorded returns the devices that Kubernetes chose in the recording.
func (r *replay) pickRecorded(from []int, n int) []int {
	var out []int
	for _, i := range from {
		if slices.Contains(r.want.VFs[r.container], i) {
			out = append(out, i)
		}
	}
	if r.seen["picked"]++; len(out) != n {
		r.t.Errorf("%d of %v, but %v were taken", n, from, r.want.VFs[r.container])
		return from[:n]
	}
	return out
}

// preferRecorded stores a request to the plugin, and returns the devices that the plugin returned in the recording.
func (r *replay) preferRecorded(available, must []int, n int) []int {
	q := recordedQuestion{slices.Sorted(slices.Values(available)), slices.Sorted(slices.Values(must)), n}
	r.got.Asked = append(r.got.Asked, q)
	rest := slices.DeleteFunc(slices.Clone(q.Available), func(i int) bool { return slices.Contains(q.Must, i) })
	all := slices.Concat(q.Must, rest)
	switch r.Plugin {
	case "lowest":
		return all[:n]
	case "too few":
		return all[:n-1]
	}
	return all
}
