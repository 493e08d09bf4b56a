#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# as-user.sh COMMAND...: runs a shell command as the user nobody, in a copy of this tree without the files that git ignores. The user has a
# separate home and separate Go caches.
# as-user.sh -test PACKAGE...: runs tests and the demo as nobody. Root builds them, so that nothing is compiled a second time.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d /var/tmp/podlace-user.XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/source"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source"
[ "$1" != -test ] || cp -r bin "$work/source"
chown -R nobody "$work"
as_nobody=(runuser -u nobody -- env -i PATH="$PATH" HOME="$work/home" TMPDIR=/tmp LANG=C.UTF-8 KERNELTEST="${KERNELTEST:-}")
cd "$work/source"
if [ "$1" != -test ]; then
  "${as_nobody[@]}" GOPROXY="$(go env GOPROXY)" GOSUMDB="$(go env GOSUMDB)" VERSION="${VERSION:-user}" GOFLAGS="-modcacherw ${GOFLAGS:-}" bash -c "$*"
  exit
fi
shift
# go test -exec starts this program. The folder in which Go builds the tests is readable only for root.
cat >"$work/exec" <<EOF
#!/bin/bash
copy=\$(mktemp '$work/home/XXXXXX.test')
cp "\$1" "\$copy"
chmod 755 "\$copy"
shift
$(printf '%q ' "${as_nobody[@]}") PODLACE_BIN='$work/source/bin' "\$copy" "\$@"
status=\$?
rm -f "\$copy"
exit \$status
EOF
chmod 755 "$work/exec"
PODLACE_BIN=$work/source/bin PACKAGES="$*" scripts/test.sh -exec "$work/exec"
"${as_nobody[@]}" bin/podlace demo
