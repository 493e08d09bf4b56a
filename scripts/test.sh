#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [go test flags]: runs all tests of the main module, or the tests of $PACKAGES, and prints each package when it ends. Packages run
# in parallel, and tests that measure traffic (TestMeasured…) run alone at the end. test.sh counts skipped tests by reason, and prints for
# each failed test the command that runs only this test. The tests create their own namespaces, and need no root and no network.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v go >/dev/null || { echo "test: no go in PATH ($PATH)" >&2; exit 1; }
log=$(mktemp)
trap '[ "$status" -ne 0 ] || rm -f "$log"' EXIT
status=0
# The tests do not use programs in bin/ that were built from other sources: without PODLACE_BIN they build their own.
if [ -z "${PODLACE_BIN:-}" ] && [ "$(cat bin/.source 2>/dev/null)" = "$(scripts/source-hash.sh)" ]; then
  export PODLACE_BIN=$PWD/bin
fi
# The flags of make build, so that packages are compiled once.
export CGO_ENABLED=${CGO_ENABLED:-0}
# A test that hangs ends its package after this time, and go test prints where it hangs.
timeout=20m
# run PACKAGES FLAGS: runs tests and shows the packages and the failures.
run() {
  go test -trimpath -buildvcs=false -count=1 -v -timeout "$timeout" "$@" 2>&1 | tee -a "$log" | grep --line-buffered -E '^(ok|FAIL|--- FAIL)' || status=${PIPESTATUS[0]}
}
# go test prints packages in this order, so the long ones stand at the end.
read -ra packages <<<"${PACKAGES:-./conf/... ./pkg/... ./plugins/... ./integration/...}"
case " $* " in
*' -run'* | *' -test.run'* | *' -skip'*) run "${packages[@]}" "$@" ;;
*' -short'*) timeout=8m run "${packages[@]}" -skip '^TestMeasured' "$@" ;;
*)
  run "${packages[@]}" -skip '^TestMeasured' "$@"
  mapfile -t measured < <(go list -f '{{.Dir}} {{.ImportPath}}' "${packages[@]}" |
    while read -r dir package; do ! grep -qs '^func TestMeasured' "$dir"/*_test.go || echo "$package"; done)
  [ "${#measured[@]}" -eq 0 ] || run "${measured[@]}" -run '^TestMeasured' -p 1 "$@"
  ;;
esac
passed=$(grep -cE '^ *--- PASS' "$log" || true)
failed=$(grep -cE '^ *--- FAIL' "$log" || true)
if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then
  failed=$(grep -cE '^FAIL\s' "$log" || true)
fi
# If no test has started, go test itself has failed, for example because of a wrong flag.
[ "$status" -eq 0 ] || grep -qE '^=== RUN|\[(build|setup) failed\]' "$log" || head -n 5 "$log"
skipped=$(grep -cE '^ *--- SKIP|^SKIP ' "$log" || true)
if [ "$status" -eq 0 ] && [ $((passed + failed + skipped)) -eq 0 ]; then
  echo "test: there is no such test" >&2
  status=1
fi
if [ "$skipped" -gt 0 ]; then
  echo "skipped, with the reason:"
  # The reason is the last output of the test or, if the test has no name, the previous line.
  awk '/^=== / {name = $3} /^ +[^ ]+\.go:[0-9]+: / {said[name] = $0}
    /^ *--- SKIP/ {why = $3 in said ? said[$3] : last; sub(/^ */, "", why); print "  " $3 ": " why} /^SKIP / {print "  " $0} {last = $0}' "$log"
fi
if [ "$status" -ne 0 ]; then
  race=
  [[ " $* " != *' -race '* ]] || race='CGO_ENABLED=1 go test -race'
  awk -v "go=${race:-go test}" -f scripts/failures.awk "$log"
  printf '\nthe whole log: %s\n' "$log"
fi
echo "$passed passed, $failed failed, $skipped skipped in $((SECONDS / 60)) min $((SECONDS % 60)) s"
exit "$status"
