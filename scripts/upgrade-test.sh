#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# upgrade-test.sh FOLDER [go test flags]: runs the tests of integration/upgrade with the programs in bin/ and with those of the commit
# $FROM, which it builds once into the folder. Without FROM, it takes the newest commit that is older than the day of HEAD (UTC).
set -euo pipefail
die() {
  echo "upgrade: $*" >&2
  exit 1
}
folder=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
[ -e .git ] || die "this tree has no git history, so no earlier commit can be built: run make upgrade in a clone"
unshallow=
[ "$(git rev-parse --is-shallow-repository)" = false ] || unshallow=": the clone is shallow, run git fetch --unshallow"
if [ -n "${FROM:-}" ]; then
  from=$(git rev-parse --verify --quiet "$FROM^{commit}") || die "no commit $FROM$unshallow"
else
  midnight=$(($(git log -1 --format=%ct) / 86400 * 86400))
  from=$(git rev-list -1 --before="$((midnight - 1)) +0000" HEAD)
  [ -n "$from" ] || die "HEAD has no commit before $(date -u -d "@$midnight" +%F)$unshallow"
fi

name=$(git log -1 --format='%h of %cs, %s' "$from")
old=$folder/$from
if [ ! -d "$old" ]; then
  echo "upgrade: building, once, the programs of $name, into $old"
  mkdir -p "$folder"
  new=$(mktemp -d "$folder/.new.XXXXXX")
  trap 'rm -rf "$new"' EXIT
  git archive "$from" | tar -x -C "$new"
  make -s -C "$new" build
  [ -d "$old" ] || mv -T "$new/bin" "$old" # another run may have built the same commit
  rm -rf "$new"
  trap - EXIT
fi
echo "upgrade: from $name, to $(scripts/version.sh version)"
PODLACE_OLD=$old PODLACE_BIN=$PWD/bin KERNELTEST=${KERNELTEST:-require} exec \
  go test -buildvcs=false -count=1 -v -timeout 15m ./integration/upgrade "$@"
