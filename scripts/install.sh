#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install.sh FROM TO NAME...: copies binaries into a folder that may be in use: each is written beside its place and renamed, so that a
# runtime starts the old one or the new one, never half of it. Owner and mode of an existing folder stay as they are.
set -eu
umask 022
from=$1 to=$2
shift 2
for name in "$@"; do
  if [ ! -f "$from/$name" ]; then
    echo "install: $from/$name is missing: run 'make build' first" >&2
    exit 1
  fi
done
for name in "$@"; do
  if [ -d "$to/$name" ]; then
    echo "install: $to/$name is a folder" >&2
    exit 1
  fi
done
[ -d "$to" ] || mkdir -p -m 0755 "$to"
for name in "$@"; do
  temp=$(mktemp "$to/.$name.XXXXXX")
  trap 'rm -f "$temp"' EXIT
  cp "$from/$name" "$temp"
  chmod 0755 "$temp"
  mv -fT "$temp" "$to/$name"
  trap - EXIT
  echo "installed $to/$name"
done
