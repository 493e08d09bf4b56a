#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh: runs every fuzz target for FUZZTIME.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${FUZZTIME:-10s}
grep -rnE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' pkg | sed -E 's#^([^:]+)/[^/:]+:[0-9]+:func (Fuzz[A-Za-z0-9_]+).*#\1 \2#' | sort -u |
while read -r package target; do
  echo "fuzz $package $target"
  go test -buildvcs=false -run '^$' -fuzz "^$target\$" -fuzztime "$time" "./$package"
done
