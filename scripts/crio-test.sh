#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# crio-test.sh CACHE [go test flags]: runs the tests of integration/e2e/crio, and the test of integration/e2e/kubelet that needs no
# containerd. The tests use the CRI-O in $CRIO, or without $CRIO the CRI-O in the cache.
set -euo pipefail
cache=$1
shift
cd "$(dirname "$0")/.."
export PODLACE_BIN=${PODLACE_BIN:-$PWD/bin}
if [ "$(id -u)" -eq 0 ]; then
  export CRIO=${CRIO:-$(scripts/crio.sh "$cache/crio")}
fi
go -C integration/e2e/crio test -buildvcs=false -count=1 -timeout 10m "$@" ./...
scripts/node-test.sh "$cache/programs" -run '^TestPlainPod$'
