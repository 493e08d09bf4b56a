#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# as-user.sh COMMAND...: runs a shell command as the user nobody, in a copy of this tree without the files that git ignores. The user has a
# separate home and separate Go caches, which begin empty, or with SHARED=1 as copies of root's (overlays, in a mount
# namespace), which must have all modules.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${SHARED:-}" ] && [ -z "${UNSHARED:-}" ] && unshare --mount true; then
  UNSHARED=1 exec unshare --mount scripts/as-user.sh "$@"
fi
work=$(mktemp -d /var/tmp/podlace-user.XXXXXX)
trap 'umount -q "$work"/home/{build,mod} || :; rm -rf "$work"' EXIT
mkdir "$work/home" "$work/source" "$work/home/build" "$work/home/mod"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source"
chown -R nobody "$work"
# copy FOLDER NAME: shows the files of a folder in the user's home. The user may add files to each folder at the top.
copy() {
  mkdir "$work/$2-upper" "$work/$2-work"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$work/$2-upper,workdir=$work/$2-work" "$work/home/$2" || return
  find "$work/home/$2" -maxdepth 1 -exec chown nobody {} +
}
if [ -n "${UNSHARED:-}" ]; then
  copy "$(go env GOCACHE)" build && copy "$(go env GOMODCACHE)" mod || echo "as-user.sh: overlays do not work here, so caches begin empty" >&2
fi
cd "$work/source"
runuser -u nobody -- env -i PATH="$PATH" HOME="$work/home" TMPDIR=/tmp LANG=C.UTF-8 GOPROXY="$(go env GOPROXY)" \
  GOCACHE="$work/home/build" GOMODCACHE="$work/home/mod" GOSUMDB="$(go env GOSUMDB)" VERSION="${VERSION:-user}" \
  GOFLAGS="-modcacherw ${GOFLAGS:-}" KERNELTEST="${KERNELTEST:-}" bash -c "$*"
