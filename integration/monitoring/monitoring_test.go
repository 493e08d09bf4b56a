// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

const (
	conf         = "../../conf/"
	rulesFile    = conf + "prometheus/podlace.yaml"
	devicePlugin = "plugins/sriov-device-plugin/README.md"
)

func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// listedMetric is one line of a list in testdata.
type listedMetric struct {
	kind   string
	labels []string
}

func metricsOf(t testing.TB, files ...string) map[string]listedMetric {
	t.Helper()
	found := map[string]listedMetric{}
	for _, file := range files {
		for line := range strings.Lines(read(t, "testdata/"+file+".txt")) {
			fields := append(strings.Fields(line), "")
			found[fields[0]] = listedMetric{fields[1], slices.DeleteFunc(strings.Split(fields[2], ","), func(l string) bool { return l == "" })}
		}
	}
	return found
}

func allServed(t testing.TB) map[string]listedMetric {
	return metricsOf(t, "podlace-node", "sriov-device-plugin", "sriov-dra")
}

// queryChecker collects a query's mistakes, such as a metric that no program serves.
type queryChecker struct {
	metrics  map[string]listedMetric
	known    []string // the labels that every metric has after the scrape, and those of the selected metrics
	problems []string
}

// checkQuery returns a query's mistakes: metrics and labels that no program serves, and functions that do not suit a metric's type. texts
// are legends or annotations with labels in braces.
func checkQuery(metrics map[string]listedMetric, query string, texts ...string) []string {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(strings.ReplaceAll(query, "$__rate_interval", "5m"))
	if err != nil {
		return []string{err.Error()}
	}
	c := &queryChecker{metrics: metrics, known: []string{"instance"}}
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			ranged := false
			if len(path) > 0 {
				_, ranged = path[len(path)-1].(*parser.MatrixSelector)
			}
			c.selector(selector, ranged)
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if a, ok := node.(*parser.AggregateExpr); ok {
			c.aggregate(a, texts)
		}
		return nil
	})
	for _, text := range texts {
		c.use(fmt.Sprintf("%q: the query", text), labelsIn(text)...)
	}
	return c.problems
}

func (c *queryChecker) add(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// use checks that the query's metrics have these labels.
func (c *queryChecker) use(where string, labels ...string) {
	for _, label := range labels {
		if !slices.Contains(c.known, label) {
			c.add("%s has no label %s", where, label)
		}
	}
}

func (c *queryChecker) selector(selector *parser.VectorSelector, ranged bool) {
	m, ok := c.metrics[selector.Name]
	base := regexp.MustCompile("_(bucket|sum|count)$").ReplaceAllString(selector.Name, "")
	if !ok && c.metrics[base].kind == "histogram" {
		m, ok = listedMetric{"counter", append([]string{"le"}, c.metrics[base].labels...)}, true
	}
	if !ok || m.kind == "histogram" {
		c.add("no program serves %s: name a metric of integration/monitoring/testdata/*.txt", selector.Name)
		return
	}
	if ranged != (m.kind == "counter") {
		c.add("%s is a %s: rate and increase are for counters", selector.Name, m.kind)
	}
	for _, matcher := range selector.LabelMatchers {
		if matcher.Name != model.MetricNameLabel && matcher.Name != "instance" && !slices.Contains(m.labels, matcher.Name) {
			c.add("%s has no label %s", selector.Name, matcher.Name)
		}
	}
	c.known = append(c.known, m.labels...)
}

// aggregate checks an aggregation's labels. If it drops `instance`, no legend or annotation may contain it.
func (c *queryChecker) aggregate(a *parser.AggregateExpr, texts []string) {
	c.use(a.String(), a.Grouping...)
	if a.Without || a.Op == parser.TOPK || a.Op == parser.BOTTOMK || slices.Contains(a.Grouping, "instance") {
		return
	}
	for _, text := range texts {
		if slices.Contains(labelsIn(text), "instance") {
			c.add("%q: %s aggregates the label instance", text, a)
		}
	}
}

// labelsIn returns the labels in a Grafana legend or a Prometheus annotation.
func labelsIn(text string) (labels []string) {
	for _, match := range regexp.MustCompile(`{{ *(?:\$labels\.)?([a-z_]+) *}}`).FindAllStringSubmatch(text, -1) {
		labels = append(labels, match[1])
	}
	return labels
}

func TestCheck(t *testing.T) {
	metrics := map[string]listedMetric{"a": {"gauge", []string{"network"}}, "c_total": {"counter", nil},
		"h_seconds": {"histogram", []string{"kind"}}}
	for query, says := range map[string]string{
		`sum by (network) (a{instance=~"$instance"})`:                             "",
		`rate(c_total[$__rate_interval]) > 0`:                                     "",
		`histogram_quantile(0.5, sum by (le, kind) (rate(h_seconds_bucket[5m])))`: "",
		`sum by (network (a)`:                                                     "parse error",
		`b`:                                                                       "no program serves b",
		`h_seconds`:                                                               "no program serves h_seconds",
		`a_count`:                                                                 "no program serves a_count",
		`a{pod="x"}`:                                                              "a has no label pod",
		`sum by (pod) (a)`:                                                        "no label pod",
		`rate(a[5m])`:                                                             "a is a gauge",
		`c_total > 5`:                                                             "c_total is a counter",
	} {
		got := strings.Join(checkQuery(metrics, query), "; ")
		if (got == "") != (says == "") || !strings.Contains(got, says) {
			t.Errorf("%s: %q, want %q", query, got, says)
		}
	}
	for text, says := range map[string]string{"{{network}}": "", "{{ $labels.network }} {{ $value }}": "", "{{pod}}": "no label pod",
		"{{instance}}": "aggregates the label instance"} {
		got := strings.Join(checkQuery(metrics, "sum by (network) (a)", text), "; ")
		if (got == "") != (says == "") || !strings.Contains(got, says) {
			t.Errorf("%s: %q, want %q", text, got, says)
		}
	}
}

// grafanaDashboard is what the test reads of Grafana's model.
type grafanaDashboard struct {
	Panels []struct {
		ID      int    `json:"id"`
		Title   string `json:"title"`
		Type    string `json:"type"`
		GridPos struct{ X, Y, W, H int }
		Targets []struct{ Expr, LegendFormat, RefID string }
	} `json:"panels"`
	Templating struct {
		List []struct {
			Name, Definition string
			Query            json.RawMessage
		}
	} `json:"templating"`
}

// Queries of the dashboard parse and use only metrics and labels that the programs serve. Panels do not overlap.
func TestDashboard(t *testing.T) {
	var d grafanaDashboard
	if err := json.Unmarshal([]byte(read(t, conf+"grafana/podlace.json")), &d); err != nil {
		t.Fatal(err)
	}
	metrics, queries, cells, ids := allServed(t), 0, map[[2]int]string{}, map[int]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("conf/grafana/podlace.json: %s: a second panel has the id %d: choose an unused id", p.Title, p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if cells[[2]int{x, y}] != "" || x >= 24 {
					t.Fatalf("conf/grafana/podlace.json: %s covers %q or the right edge: change its gridPos", p.Title, cells[[2]int{x, y}])
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		for _, q := range p.Targets {
			queries++
			for _, problem := range checkQuery(metrics, q.Expr, q.LegendFormat) {
				t.Errorf("conf/grafana/podlace.json: panel %s: expr %s: %s", p.Title, q.Expr, problem)
			}
		}
	}
	for _, v := range d.Templating.List {
		for _, name := range regexp.MustCompile(`podlace_\w+`).FindAllString(v.Definition+string(v.Query), -1) {
			if _, ok := metrics[name]; !ok {
				t.Errorf("conf/grafana/podlace.json: the variable %s: no program serves %s: correct its query", v.Name, name)
			}
		}
	}
	if queries < 30 {
		t.Errorf("conf/grafana/podlace.json has only %d queries, at least 30 are wanted: restore the missing panels", queries)
	}
}

func alertRules(t testing.TB) (list []rulefmt.Rule) {
	t.Helper()
	groups, errs := rulefmt.Parse([]byte(read(t, rulesFile)), false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	if groups == nil {
		t.FailNow()
	}
	for _, g := range groups.Groups {
		list = append(list, g.Rules...)
	}
	return list
}

// Alerting rules use only metrics and labels that the programs serve. docs/OPERATING.md describes exactly the existing alerts.
func TestAlerts(t *testing.T) {
	metrics, names := allServed(t), []string{}
	for _, rule := range alertRules(t) {
		names = append(names, rule.Alert)
		for _, problem := range checkQuery(metrics, rule.Expr, rule.Annotations["description"], rule.Annotations["summary"]) {
			t.Errorf("conf/prometheus/podlace.yaml: alert %s: %s", rule.Alert, problem)
		}
		if rule.For == 0 || rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
			t.Errorf("conf/prometheus/podlace.yaml: alert %s: write for, severity, summary and description", rule.Alert)
		}
	}
	var told []string
	for _, match := range regexp.MustCompile("(?m)^\\| `(Podlace[A-Za-z]+)` \\|").FindAllStringSubmatch(read(t, "../../docs/OPERATING.md"), -1) {
		told = append(told, match[1])
	}
	if diff := cmp.Diff(names, told); diff != "" || len(names) < 10 {
		t.Errorf("docs/OPERATING.md needs one row \"| `ALERT` | WHAT TO DO |\" for each of the %d alerts, in their order\n(-alerts +rows)\n%s",
			len(names), diff)
	}
}

// runPromtool runs promtool on a folder with podlace.yaml and podlace_test.yaml.
func runPromtool(t testing.TB, dir string, args ...string) (output string, err error) {
	t.Helper()
	program := os.Getenv("PROMTOOL")
	if program == "" {
		t.Skip("SKIPPED: PROMTOOL names no promtool; make monitoring builds it")
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// TestRules runs promtool's lint and the unit tests of the alerting rules.
func TestRules(t *testing.T) {
	for _, args := range [][]string{{"check", "rules", "--lint=all", "--lint-fatal", "podlace.yaml"}, {"test", "rules", "podlace_test.yaml"}} {
		if output, err := runPromtool(t, conf+"prometheus", args...); err != nil {
			t.Errorf("promtool %s: %v: correct the file in conf/prometheus that it names:\n%s", strings.Join(args, " "), err, output)
		}
	}
}

// Each alert has two tests: one fails if it never fires, the other if it always does.
func TestRulesAreTested(t *testing.T) {
	text, dir := read(t, rulesFile), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "podlace_test.yaml"), []byte(read(t, conf+"prometheus/podlace_test.yaml")), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, rule := range alertRules(t) {
		head, tail, found := strings.Cut(text, "alert: "+rule.Alert+"\n")
		expr := regexp.MustCompile(`(?m)^ +expr: .*$`).FindString(tail)
		if !found || expr == "" {
			t.Fatalf("%s: no expr", rule.Alert)
		}
		for test, broken := range map[string]string{"fires": "vector(0) > 1", "stays silent": "vector(1)"} {
			changed := head + "alert: " + rule.Alert + "\n" + strings.Replace(tail, expr, "        expr: "+broken, 1)
			if err := os.WriteFile(filepath.Join(dir, "podlace.yaml"), []byte(changed), 0o644); err != nil {
				t.Fatal(err)
			}
			output, err := runPromtool(t, dir, "test", "rules", "--run=^"+rule.Alert+" "+test+"$", "podlace_test.yaml")
			if err == nil || !strings.Contains(output, rule.Alert) {
				t.Errorf("no test notices the expression %[3]s: add the test \"%[1]s %[2]s\" to conf/prometheus/podlace_test.yaml: %[4]v\n%[5]s", rule.Alert, test,
					broken, err, output)
			}
		}
	}
}

// The README of sriov-device-plugin has a row for each metric, with all its labels.
func TestReadme(t *testing.T) {
	rows := map[string]string{}
	for _, match := range regexp.MustCompile("(?m)^\\| (`podlace_sriov_.*`) \\| (.*) \\|$").FindAllStringSubmatch(read(t,
		"../../"+devicePlugin), -1) {
		for name := range strings.SplitSeq(match[1], ", ") {
			rows[strings.Trim(name, "`")] = match[2]
		}
	}
	for name, m := range metricsOf(t, "sriov-device-plugin", "sriov-dra") {
		labels, ok := rows[name]
		if !ok {
			t.Errorf("%s lacks a metric: add the row \"| `%s` | LABELS AND MEANING |\"", devicePlugin, name)
		}
		for _, label := range m.labels {
			if !strings.Contains(labels, "`"+label+"`") {
				t.Errorf("%s: write the label `%s` into the row of %s", devicePlugin, label, name)
			}
		}
		delete(rows, name)
	}
	for name := range rows {
		t.Errorf("%s: the daemon does not serve %s: remove its row", devicePlugin, name)
	}
}

// docs/OPERATING.md has each metric of the agent, with its labels.
func TestOperating(t *testing.T) {
	told := map[string][]string{}
	for _, match := range regexp.MustCompile("`(podlace_[a-z_]+)(?:{([a-z,]+)})?`").FindAllStringSubmatch(read(t, "../../docs/OPERATING.md"), -1) {
		told[match[1]] = slices.Sorted(strings.SplitSeq(match[2], ","))
	}
	served := map[string][]string{}
	for name, m := range metricsOf(t, "podlace-node") {
		served[name] = slices.Sorted(strings.SplitSeq(strings.Join(m.labels, ","), ","))
	}
	if diff := cmp.Diff(served, told); diff != "" {
		t.Errorf("docs/OPERATING.md needs each metric of podlace-node, with its labels in braces\n(-served +document)\n%s", diff)
	}
}
