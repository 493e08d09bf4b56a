// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests conf/grafana and conf/prometheus. Its module pins Prometheus' parser and promtool, so that neither is a
// dependency of Podlace. testdata lists the metrics that each program serves; tests of the programs' packages keep the lists exact.
package monitoring
