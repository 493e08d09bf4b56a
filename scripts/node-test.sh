#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# node-test.sh FOLDER [go test flags]: runs the tests of integration/e2e/kubelet with $KUBELET, or else with the kubelet in the folder, and
# counts the skipped tests by reason.
set -euo pipefail
folder=$1
shift
cd "$(dirname "$0")/.."
kubelet=${KUBELET:-}
if [ -n "$kubelet" ]; then
  kubelet=$(realpath "$kubelet")
elif [ "$(id -u)" -eq 0 ]; then
  kubelet=$(scripts/programs.sh "$folder" kubernetes kubelet)/kubelet
fi
export KUBELET=$kubelet PODLACE_BIN=${PODLACE_BIN:-$PWD/bin}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
(cd integration/e2e/kubelet && go test -buildvcs=false -count=1 -v -timeout 15m "$@" ./...) >"$log" 2>&1 || status=$?
if [ "$status" -ne 0 ]; then
  cat "$log"
fi
grep -E '^(ok|FAIL|node: |--- )' "$log" || true
skipped=$(grep -cE '^ *--- SKIP' "$log" || true)
if [ "$skipped" -gt 0 ]; then
  echo "skipped, with the reason:"
  grep -hoE 'SKIP[^ ]* ?.*no node:.*' "$log" | sort | uniq -c
fi
echo "$(grep -cE '^ *--- PASS' "$log" || true) passed, $(grep -cE '^ *--- FAIL' "$log" || true) failed, $skipped skipped"
exit "$status"
