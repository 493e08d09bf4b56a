// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/daemon/pool"
)

func (f *sriovFlags) explain(ctx context.Context, stdout, stderr io.Writer, what string) error {
	n, err := f.readNode(ctx)
	if err != nil {
		return err
	}
	if n.configErr != nil {
		return n.configErr
	}
	for _, p := range slices.Concat(n.config.Unserved(), pool.Findings(n.config, n.snapshot, n.env)) {
		printLine(stderr, p.Error())
	}
	if f.request.count > 0 {
		return f.explainRequest(ctx, n, stdout, what)
	}
	list := pool.Explain(n.config, n.snapshot, n.env)
	for i, e := range list {
		if h := n.otherOwner(e.Device, e.Resource); h != nil {
			list[i].Resource, list[i].Reason = "", fmt.Sprintf("not offered: %s, as %s", n.describeOwner(*h), h.Resource)
		}
		if fault := n.faults[e.Device.String()]; fault != "" {
			list[i].Reason += "; it cannot be allocated at present: " + fault
		}
	}
	whole := slices.DeleteFunc(slices.Clone(list), func(e pool.Explanation) bool { return what != "" && !n.matches(e, what) })
	switch {
	case len(whole) == 0 && n.held[strings.ToLower(what)].ID != "":
		h := n.held[strings.ToLower(what)]
		return fmt.Errorf("%s is gone; %s, as %s", plain(what), strings.TrimSuffix(n.describeOwner(h), "has it")+"had it", plain(h.Resource))
	case len(whole) == 0 && n.unserved(what):
		return fmt.Errorf("%s is not served, and this node has no device of it", plain(what))
	case len(whole) == 0 && what != "":
		return fmt.Errorf("%s is no device, interface or resource of this node: 'podlace sriov ls' lists them", plain(what))
	case f.output == outputJSON:
		return printJSON(stdout, whole)
	case what == "":
		var rows [][]string
		for _, e := range whole {
			rows = append(rows, []string{e.Device.String(), dash(plain(e.Resource)), plainText(e.Reason)})
		}
		printTable(stdout, rows)
		return nil
	}
	for _, e := range whole {
		n.printExplanation(stdout, e)
	}
	return nil
}

// unserved reports whether the resource is configured with properties that the device plugin does not support.
func (n *sriovNode) unserved(resource string) bool {
	return slices.ContainsFunc(n.config.Resources, func(r pool.Resource) bool { return r.FullName() == resource && len(r.Unserved) > 0 })
}

// matches reports whether the argument selects a device: by PCI address, interface, interface of its PF, or resource.
func (n *sriovNode) matches(e pool.Explanation, what string) bool {
	d, _ := n.snapshot.Device(e.Device)
	pf, _ := n.snapshot.Device(d.PF)
	return strings.EqualFold(e.Device.String(), what) || slices.Contains(d.Interfaces, what) || slices.Contains(pf.Interfaces, what) ||
		e.Resource == what || slices.ContainsFunc(e.Answers, func(a pool.Answer) bool { return a.Matches && a.Resource == what })
}

// printExplanation prints, for each selector, the wanted values and the device's.
func (n *sriovNode) printExplanation(w io.Writer, e pool.Explanation) {
	fmt.Fprintf(w, "%s: %s\n", e.Device, plainText(e.Reason))
	if h, ok := n.held[e.Device.String()]; ok && h.Claim == nil {
		fmt.Fprintf(w, "  pod %s/%s has it, container %s, as %s\n", plain(h.Namespace), plain(h.Pod), plain(h.Container), plain(h.Resource))
	}
	for _, c := range n.claimsOf(e.Device) {
		fmt.Fprintln(w, "  "+c.describe())
	}
	n.printPublished(w, e)
	for _, a := range e.Answers {
		fmt.Fprintf(w, "  %s (line %d): %s\n", plain(a.Resource), a.Line, plainText(a.Reason))
		for _, s := range a.Selectors {
			var rows [][]string
			for _, c := range s.Checks {
				rows = append(rows, []string{map[bool]string{true: "    yes", false: "    NO"}[c.Met], c.Name, "wants " + plainText(c.Want),
					"found " + dash(plainText(c.Found))})
			}
			printTable(w, rows)
		}
	}
}
