#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install-check.sh FROM VERSION FOLDER... -- NAME...: refuses an installation that would fail half-way, or install stale binaries: the
# binaries must be newer than their sources and report VERSION, and the folders must be writable. It needs no Go, because sudo's PATH
# often lacks it.
set -eu
refuse() {
  echo "install: $*" >&2
  exit 1
}
from=$1 version=$2
shift 2
folders=()
while [ "$1" != -- ]; do
  folders+=("$1")
  shift
done
shift
again="run 'make build' as a user who has Go in PATH, then install again"

for name in "$@"; do
  [ -f "$from/$name" ] || refuse "$from/$name is missing: $again"
  newer=$(find go.mod go.sum conf pkg plugins -type f ! -name '*_test.go' ! -name '*.md' -newer "$from/$name" | sort | sed -n 1p)
  [ -z "$newer" ] || refuse "$from/$name is older than $newer: $again"
done

# podlace has the version of the same build as the plugins.
built=$("$from/podlace" version | sed -n 's/^podlace //p')
[ "$version" = unknown ] || [ "$built" = "$version" ] || refuse "$from has version $built, and the source is $version: $again"

for folder in "${folders[@]}"; do
  existing=$folder
  while [ ! -e "$existing" ]; do existing=$(dirname "$existing"); done
  [ -d "$existing" ] || refuse "$existing is not a folder"
  [ -w "$existing" ] || refuse "user $(id -un) cannot write to $existing: run 'sudo make install', or choose other folders with DESTDIR, CNI_BIN_DIR and PREFIX"
done
