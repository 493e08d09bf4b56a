#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# version.sh version|commit|time: prints the version, the commit or its time in seconds since 1970. Git supplies the values. In a
# tarball without git, `git archive` has written them into the next line.
set -eu
archived='$Format:%(describe:tags=true)|%h|%ct$'
cd "$(dirname "$0")/.."
field() { cut -d '|' -f "$1" <<<"$archived"; }

if [ -e .git ]; then
  case $1 in
    version) git describe --tags --always --dirty ;;
    commit) git rev-parse --short HEAD ;;
    time) git log -1 --format=%ct ;;
  esac
elif [ "${archived:1:7}" != Format: ]; then
  case $1 in
    version) field 1 | grep . || field 2 ;; # without a tag, `git describe` has no output
    commit) field 2 ;;
    time) field 3 ;;
  esac
else
  case $1 in
    time) echo 0 ;;
    *) echo unknown ;;
  esac
fi
