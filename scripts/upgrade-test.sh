#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# upgrade-test.sh FOLDER [go test flags]: runs the tests of integration/upgrade with the programs in bin/ and with those of the commit
# $FROM, which it builds once into the folder. Without FROM, it takes the last tag, or until there is one, the commit of the day before.
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
from=${FROM:-$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null || git rev-list -1 --before='1 day ago' HEAD)}
commit=$(git rev-parse --verify --quiet "$from^{commit}") || die "no commit ${from:-of the day before}$unshallow"

name=$(git log -1 --format='%h of %cs, %s' "$commit")
old=$folder/$commit
if [ ! -d "$old" ]; then
  echo "upgrade: building, once, the programs of $name, into $old: about 2 minutes"
  mkdir -p "$folder"
  new=$(mktemp -d "$folder/.new.XXXXXX")
  trap 'rm -rf "$new"' EXIT
  git archive "$commit" | tar -x -C "$new"
  make -s -C "$new" build
  [ -d "$old" ] || mv -T "$new/bin" "$old" # another run may have built the same commit
  rm -rf "$new"
  trap - EXIT
fi
echo "upgrade: from $name, to $(scripts/version.sh version)"
PODLACE_OLD=$old PODLACE_BIN=$PWD/bin KERNELTEST=${KERNELTEST:-require} exec \
  go test -buildvcs=false -count=1 -v -timeout 15m ./integration/upgrade "$@"
