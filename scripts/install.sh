#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install.sh FROM TO NAME...: copies binaries into a folder that may be in use: each is written beside its place and renamed, so that a
# runtime starts the old one or the new one, never half of it. Owner and mode of an existing folder stay as they are. A file of another
# project stays beside the new one as NAME.before-podlace, for a rollback.
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

# Every binary of Podlace has the path of its main package in Go's build information.
ours() { grep -qaF $'path\tgithub.com/podlace/podlace/plugins/' "$1"; }

# keep links a file to the first free name; a copy that exists is never replaced. A symbolic link is kept as one.
keep() {
  local file=$1 copy=$1.before-podlace n=1
  until ln -P "$file" "$copy" 2>/dev/null; do
    if cmp -s "$file" "$copy"; then
      return
    fi
    if [ ! -e "$copy" ] && [ ! -L "$copy" ]; then
      echo "install: cannot keep $file as $copy" >&2
      exit 1
    fi
    n=$((n + 1))
    copy=$file.before-podlace-$n
  done
  echo "kept $file as $copy"
}

[ -d "$to" ] || mkdir -p -m 0755 "$to"
for name in "$@"; do
  if { [ -e "$to/$name" ] || [ -L "$to/$name" ]; } && ! ours "$to/$name" 2>/dev/null; then
    keep "$to/$name"
  fi
done
for name in "$@"; do
  temp=$(mktemp "$to/.$name.XXXXXX")
  trap 'rm -f "$temp"' EXIT
  cp "$from/$name" "$temp"
  chmod 0755 "$temp"
  mv -fT "$temp" "$to/$name"
  trap - EXIT
  echo "installed $to/$name"
done
