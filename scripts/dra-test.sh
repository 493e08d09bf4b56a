#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# dra-test.sh CACHE [go test flags]: runs the tests of integration/e2e/dra in a cluster of one node. Kubernetes, etcd and containerd are
# built into the cache if missing. Without flags it compares each test's result with the expected result in
# integration/e2e/dra/testdata/VERSION.txt or VERSION,GATES.txt. It counts the skipped tests by reason.
#
# KUBERNETES_VERSION  1.37 (default) or 1.34; VERSION would be that of the programs
# GATES               feature gates, such as DRADeviceTaints=false
set -euo pipefail
cd "$(dirname "$0")/.."
cache=$1
shift
version=${KUBERNETES_VERSION:-1.37}
if [ -z "${KUBERNETES:-}" ]; then
  KUBERNETES=$(scripts/programs.sh "$cache/programs" kubernetes)
  if [ "$version" != 1.37 ]; then # etcd and kubectl are the same for all
    older=$(scripts/programs.sh "$cache/programs" "kubernetes-$version")
    ln -sf "$KUBERNETES/etcd" "$KUBERNETES/kubectl" "$older/"
    KUBERNETES=$older
  fi
fi
CONTAINERD=${CONTAINERD:-$(scripts/programs.sh "$cache/programs" containerd)/containerd}
export KUBERNETES CONTAINERD VERSION=$version GATES=${GATES:-} PODLACE_BIN=${PODLACE_BIN:-$PWD/bin} KERNELTEST=${KERNELTEST:-require}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
start=$SECONDS
go test -buildvcs=false -count=1 -v -timeout 60m ./integration/e2e/dra "$@" 2>&1 | tee "$log" || status=$?
echo "Kubernetes $version${GATES:+ with $GATES}: $(grep -c '^--- PASS' "$log" || true) passed, $(grep -c '^--- FAIL' "$log" || true) failed," \
  "$(grep -c '^--- SKIP' "$log" || true) skipped, in $((SECONDS - start)) s"
grep -hoE 'SKIP: .*' "$log" | sort | uniq -c || true
expected=integration/e2e/dra/testdata/$version${GATES:+,$GATES}.txt
if [ $# -eq 0 ] && [ ! -e "$expected" ]; then
  echo "not compared with expected results: $expected does not exist"
elif [ $# -eq 0 ]; then
  results=$(sed -nE 's/^--- (PASS|FAIL|SKIP): ([A-Za-z0-9]+) .*/\1 \2/p' "$log" | sort -k2)
  if ! diff <(sort -k2 "$expected") - <<<"$results"; then
    echo "results differ from $expected (<): correct the cause, or write the lines with > into the file"
    [ "$status" -ne 0 ] || status=1
  fi
fi
exit "$status"
