#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# as-user.sh COMMAND...: runs a shell command as the user nobody, in a copy of this tree without the files that git ignores. The user has a
# separate home and separate Go caches.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d /var/tmp/podlace-user.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/source"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source"
chown -R nobody "$work"
cd "$work/source"
runuser -u nobody -- env -i PATH="$PATH" HOME="$work/home" TMPDIR=/tmp LANG=C.UTF-8 GOPROXY="$(go env GOPROXY)" \
  GOSUMDB="$(go env GOSUMDB)" VERSION="${VERSION:-user}" GOFLAGS="-modcacherw ${GOFLAGS:-}" KERNELTEST="${KERNELTEST:-}" bash -c "$*"
