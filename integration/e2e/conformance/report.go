// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// specState is the result of one Kubernetes e2e test (spec).
type specState string

const (
	passed  specState = "passed"
	failed  specState = "failed"
	skipped specState = "skipped" // by the spec itself, with a reason
	notRun  specState = "not run" // by the filters of the run, or because the run ended before
)

type specResult struct {
	Name   string
	State  specState
	Reason string // of a failure or of a skip
	Took   time.Duration
}

// suiteReport has the results of all e2e tests (specs) by name. Trouble are failures of no spec.
type suiteReport struct {
	Results map[string]specResult
	Trouble []string
}

// ginkgoSuite is what this program reads of Ginkgo's JSON report.
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
func readReport(path string) (suiteReport, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return suiteReport{}, fmt.Errorf("read the report of e2e.test: %w", err)
	}
	var suites []ginkgoSuite
	if err := json.Unmarshal(data, &suites); err != nil {
		return suiteReport{}, fmt.Errorf("parse the report %s: %w", path, err)
	}
	all := suiteReport{Results: map[string]specResult{}}
	for _, suite := range suites {
		all.Trouble = append(all.Trouble, suite.SpecialSuiteFailureReasons...)
		for _, spec := range suite.SpecReports {
			all.add(spec)
		}
	}
	if len(all.Results) == 0 {
		return suiteReport{}, fmt.Errorf("the report %s has no spec; %s", path, strings.Join(all.Trouble, "; "))
	}
	return all, nil
}

func (r *suiteReport) add(spec ginkgoSpec) {
	one := specResult{
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
		r.addResult(one)
	} else if one.State == failed {
		r.Trouble = append(r.Trouble, spec.LeafNodeType+": "+one.Reason)
	}
}

// addResult adds a test's result to the report. If there are two, a failure takes precedence over all others, and every other one over "not
// run".
func (r *suiteReport) addResult(one specResult) {
	rank := map[specState]int{notRun: 1, skipped: 2, passed: 3, failed: 4}
	if rank[one.State] > rank[r.Results[one.Name].State] {
		r.Results[one.Name] = one
	}
}

// mergeReport adds the results of another run of the same e2e tests.
func (r *suiteReport) mergeReport(other suiteReport) {
	r.Trouble = append(r.Trouble, other.Trouble...)
	for _, one := range other.Results {
		r.addResult(one)
	}
}
