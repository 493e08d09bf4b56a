// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests conf/grafana and conf/prometheus. It is a module of its own, so that Podlace does not require Prometheus' parser
// and promtool. testdata lists the metrics that each program serves, which tests of these programs compare.
package monitoring
