#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# nightly.sh TARGET..: runs make targets one after another, also after a failure, and prints one table with their results and times. The
# output of each target goes to a file of its own, and the end of it is shown if the target fails.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "nightly: no target in TARGETS" >&2; exit 1; }
for target in "$@"; do
  make --no-print-directory --dry-run "$target" >/dev/null || { echo "nightly: 'make nightly-list' prints the targets" >&2; exit 1; }
done
scripts/ci-install.sh nightly
logs=build/nightly
rm -rf "$logs"
mkdir -p "$logs"
declare -A arguments=(
  [cluster]=-test
  [e2e]='-proxy nftables,iptables'
  [soak]='-for 1h'
)
rows=() failed=0
for target in "$@"; do
  begin=$SECONDS result=passed
  echo "=== make $target, to $logs/$target.log (load $(cut -d ' ' -f 1 /proc/loadavg))"
  KERNELTEST=require timeout 4h make --no-print-directory "$target" ARGS="${ARGS:-${arguments[$target]:-}}" >"$logs/$target.log" 2>&1 || result="failed ($?)"
  if [ "$result" != passed ]; then
    failed=$((failed + 1))
    tail -n 40 "$logs/$target.log"
  fi
  # The last count that the target prints: "5 passed, 0 failed, 1 skipped", or Go's "ok".
  said=$(awk '/[0-9]+ (passed|ok)|^ok/ { last = $0 } END { gsub(/[\t|]/, " ", last); print last }' "$logs/$target.log")
  rows+=("| $target | $result | $(((SECONDS - begin) / 60)) min $(((SECONDS - begin) % 60)) s | ${said:--} |")
done
printf '\n| Target | Result | Time | Last count |\n| --- | --- | --- | --- |\n'
printf '%s\n' "${rows[@]}"
echo "$((${#rows[@]} - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
