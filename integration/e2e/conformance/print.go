// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// printOutcome prints the result of each test that ran. An asterisk marks the required ones.
func printOutcome(to io.Writer, title string, list []string, got suiteReport, took time.Duration) {
	count := map[specState]int{}
	var ran []specResult
	for _, one := range got.Results {
		count[one.State]++
		if one.State != notRun {
			ran = append(ran, one)
		}
	}
	order := []specState{passed, skipped, failed}
	slices.SortFunc(ran, func(a, b specResult) int {
		return cmp.Or(slices.Index(order, a.State)-slices.Index(order, b.State), strings.Compare(a.Name, b.Name))
	})
	for _, one := range ran {
		mark := " "
		if slices.Contains(list, one.Name) {
			mark = "*"
		}
		fmt.Fprintf(to, "%-7s %s %4.0f s  %s\n", one.State, mark, one.Took.Seconds(), one.Name)
		if one.State != passed {
			fmt.Fprintf(to, "                  %s\n", strings.ReplaceAll(shortenReason(one.Reason), "\n", "\n                  "))
		}
	}
	for _, trouble := range got.Trouble {
		fmt.Fprintf(to, "outside of specs: %s\n", shortenReason(trouble))
	}
	fmt.Fprintf(to, "%s: %d passed, %d failed, %d skipped, %d not selected, in %s\n",
		title, count[passed], count[failed], count[skipped], count[notRun], took.Round(time.Second))
	if len(list) > 0 {
		fmt.Fprintf(to, "%d of the %d specs in the list (*) passed, and %d that are not in it\n",
			len(list)-len(failuresOf(list, got)), len(list), len(unlistedSpecs(list, got, passed)))
	}
}

// printDifferences prints the e2e tests whose results differ between two runs.
func printDifferences(to io.Writer, titles [2]string, got [2]suiteReport) {
	var names []string
	for name, one := range got[0].Results {
		if one.State != got[1].Results[name].State {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	fmt.Fprintf(to, "%d specs differ between %s and %s\n", len(names), titles[0], titles[1])
	for _, name := range names {
		fmt.Fprintf(to, "%-7s %-7s  %s\n", got[0].Results[name].State, cmp.Or(got[1].Results[name].State, notRun), name)
	}
}

// shortenReason returns the first lines of a reason, because Kubernetes' failure messages contain whole objects.
func shortenReason(reason string) string {
	const lines, columns = 3, 200
	var short []string
	for line := range strings.Lines(reason) {
		line = strings.TrimRight(line, "\n")
		if len(short) == lines {
			break
		}
		if len(line) > columns {
			line = line[:columns] + "..."
		}
		short = append(short, line)
	}
	return strings.Join(short, "\n")
}
