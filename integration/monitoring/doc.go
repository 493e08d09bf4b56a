// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests conf/grafana and conf/prometheus. A separate go.mod pins Prometheus' parser and promtool, so that Podlace does
// not depend on these modules. testdata lists the metrics that each program serves. Tests of the programs' packages compare these lists
// with the programs.
package monitoring
