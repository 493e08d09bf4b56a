#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# licenses.sh: prints the license and notice files of each module that is linked into a program of plugins/, in the order of their paths.
set -euo pipefail
cd "$(dirname "$0")/.."
go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./plugins/... | LC_ALL=C sort -u |
  while read -r module version dir; do
    files=$(find "$dir" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' \) | LC_ALL=C sort)
    [ -n "$files" ] || { echo "licenses: $module has no license file in $dir" >&2; exit 1; }
    while IFS= read -r file; do
      printf '=== %s %s: %s\n\n' "$module" "$version" "$(basename "$file")"
      cat "$file"
      printf '\n'
    done <<<"$files"
  done
printf '=== Go %s: LICENSE\n\n' "$(go env GOVERSION)"
cat "$(go env GOROOT)/LICENSE"
