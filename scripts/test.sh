#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [go test flags]: runs all tests of the main module, or the tests of $PACKAGES, and prints each package when it ends. It
# counts skipped tests by reason. For each failed test it prints the command that runs only this test. The tests create their own namespaces,
# and need no root and no network.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap '[ "$status" -ne 0 ] || rm -f "$log"' EXIT
status=0
# The tests do not use programs in bin/ that were built from other sources: without PODLACE_BIN they build their own.
if [ -z "${PODLACE_BIN:-}" ] && [ "$(cat bin/.source 2>/dev/null)" = "$(scripts/source-hash.sh)" ]; then
  export PODLACE_BIN=$PWD/bin
fi
# -p 1: the packages measure traffic and must not slow one another down.
go test -buildvcs=false -p 1 -v -timeout 20m "$@" ${PACKAGES:-./...} 2>&1 | tee "$log" | grep --line-buffered -E '^(ok|FAIL|--- FAIL)' || status=${PIPESTATUS[0]}
passed=$(grep -cE '^ *--- PASS' "$log" || true)
failed=$(grep -cE '^ *--- FAIL' "$log" || true)
if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then
  failed=$(grep -cE '^FAIL\s' "$log" || true)
fi
skipped=$(grep -cE '^ *--- SKIP|^SKIP ' "$log" || true)
if [ "$skipped" -gt 0 ]; then
  echo "skipped, with the reason:"
  # The reason is the last output of the test. If the test has no name, the reason is in the previous line.
  awk '/^=== / {name = $3} /^ +[^ ]+\.go:[0-9]+: / {said[name] = $0}
    /^ *--- SKIP/ {why = $3 in said ? said[$3] : last; sub(/^ */, "", why); print "  " $3 ": " why} /^SKIP / {print "  " $0} {last = $0}' "$log"
fi
if [ "$status" -ne 0 ]; then
  awk -f scripts/failures.awk "$log"
  printf '\nthe whole log: %s\n' "$log"
fi
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
