// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests conf/grafana and conf/prometheus. A separate go.mod pins the versions of Prometheus' parser and promtool, so
// that Podlace's own go.mod does not require these modules. testdata lists the metrics that each program serves. Tests in the packages of
// these programs compare the lists in testdata with the served metrics.
package monitoring
