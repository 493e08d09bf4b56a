// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// state is the result of a spec.
type state string

const (
	passed  state = "passed"
	failed  state = "failed"
	skipped state = "skipped" // by the spec itself, with a reason
	notRun  state = "not run" // by the filters of the run, or because the run ended before
)

// result is the outcome of one spec.
type result struct {
	Name   string
	State  state
	Reason string // of a failure or of a skip
	Took   time.Duration
}

// report contains the outcome of all specs of a suite, by name. Trouble lists failures outside of specs.
type report struct {
	Results map[string]result
	Trouble []string
}

// ginkgoSuite is the part of Ginkgo's JSON report that is needed here.
type ginkgoSuite struct {
	SpecialSuiteFailureReasons []string
	SpecReports                []ginkgoSpec
}

type ginkgoSpec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

// readReport reads one JSON report of Ginkgo.
func readReport(path string) (report, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return report{}, fmt.Errorf("read the report of e2e.test: %w", err)
	}
	var suites []ginkgoSuite
	if err := json.Unmarshal(data, &suites); err != nil {
		return report{}, fmt.Errorf("parse the report %s: %w", path, err)
	}
	all := report{Results: map[string]result{}}
	for _, suite := range suites {
		all.Trouble = append(all.Trouble, suite.SpecialSuiteFailureReasons...)
		for _, spec := range suite.SpecReports {
			all.add(spec)
		}
	}
	if len(all.Results) == 0 {
		return report{}, fmt.Errorf("the report %s has no spec; %s", path, strings.Join(all.Trouble, "; "))
	}
	return all, nil
}

func (r *report) add(spec ginkgoSpec) {
	one := result{
		Name: strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " "),
		Took: spec.RunTime, Reason: strings.TrimSpace(spec.Failure.Message),
	}
	switch spec.State {
	case "passed":
		one.State = passed
	case "skipped":
		one.State = skipped
		if one.Reason == "" { // Ginkgo uses one word for both
			one.State = notRun
		}
	case "pending", "":
		one.State = notRun
	default: // failed, panicked, interrupted, aborted, timedout
		one.State = failed
		one.Reason = strings.TrimPrefix(spec.State+": "+one.Reason, "failed: ")
	}
	if spec.LeafNodeType == "It" {
		r.put(one)
	} else if one.State == failed {
		r.Trouble = append(r.Trouble, spec.LeafNodeType+": "+one.Reason)
	}
}

// put merges one result of a spec: a failure takes precedence over everything, and any result over a spec that did not run.
func (r *report) put(one result) {
	rank := map[state]int{notRun: 1, skipped: 2, passed: 3, failed: 4}
	if rank[one.State] > rank[r.Results[one.Name].State] {
		r.Results[one.Name] = one
	}
}

// merge adds the results of another run of the same suite.
func (r *report) merge(other report) {
	r.Trouble = append(r.Trouble, other.Trouble...)
	for _, one := range other.Results {
		r.put(one)
	}
}
