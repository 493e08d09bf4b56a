#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install-check.sh FROM FOLDER... -- NAME...: prevents an installation that would fail half-way or install stale binaries. The binaries
# must be built from the current sources, and the folders must be writable. install-check.sh works without Go, because sudo's PATH often does
# not contain Go.
set -eu
refuse() {
  echo "install: $*" >&2
  exit 1
}
from=$1
shift
folders=()
while [ "$1" != -- ]; do
  folders+=("$1")
  shift
done
shift
again="run 'make build' as a user who has Go in PATH, then install again"

for name in "$@"; do
  [ -f "$from/$name" ] || refuse "$from/$name is missing: $again"
done
[ "$(cat "$from/.source" 2>/dev/null)" = "$(scripts/source-hash.sh)" ] || refuse "the binaries in $from were built from other sources: $again"

[ -z "${DRYRUN:-}" ] || exit 0 # a plan changes no file
for folder in "${folders[@]}"; do
  existing=$folder
  while [ ! -e "$existing" ]; do existing=$(dirname "$existing"); done
  [ -d "$existing" ] || refuse "$existing is not a folder"
  [ -w "$existing" ] || refuse "user $(id -un) cannot write to $existing: run 'sudo make install', or choose other folders with DESTDIR, CNI_BIN_DIR and PREFIX"
done
