#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ci.sh: runs every check of the project, also after a failed one, and prints the result and the time of each. As root on Debian, ci.sh
# installs the required programs. Elsewhere ci.sh uses the installed programs, and the tests print which tests they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
rows=() failed=0

# step TITLE COMMAND...
step() {
  local title=$1 begin=$SECONDS result=ok
  shift
  printf '\n=== %s (%d s, load %s)\n' "$title" "$SECONDS" "$(cut -d ' ' -f 1 /proc/loadavg)"
  "$@" || result="FAILED ($?)" failed=$((failed + 1))
  rows+=("$(printf '%6d s  %-12s  %s' $((SECONDS - begin)) "$result" "$title")")
}

# module FOLDER: runs the tests of another module of the tree.
module() { go -C "$1" test -trimpath -count=1 ./...; }

install_into_folder() {
  local folder
  folder=$(mktemp -d)
  make install DESTDIR="$folder" >/dev/null && ls "$folder/opt/cni/bin" "$folder/usr/local/bin" && make uninstall DESTDIR="$folder" >/dev/null &&
    rmdir "$folder"
}

# machine: prints what tests must not change outside their namespaces.
machine() {
  ls -d /run/podlace* /var/lib/cni /etc/cni/net.d /opt/cni/bin /sys/class/net/* 2>/dev/null || true
  sysctl -n net.ipv4.ip_forward net.ipv6.conf.all.forwarding kernel.hostname
}

machine_unchanged() { diff <(echo "$machine") <(machine); }

root() { [ "$(id -u)" -eq 0 ]; }

# Root can install every tool, so a skip because of a missing tool is an error.
if root; then
  step "install tools" scripts/ci-install.sh
  export KERNELTEST=require
fi
machine=$(machine)
step lint make lint
step "test as $(id -un)" make test
step "demo as $(id -un)" make demo
step "install into a folder" install_into_folder
step "image and manifest" module scripts/image
step "queries of the dashboard and the alerting rules" module integration/monitoring
step "slices, classes and claims by Kubernetes itself" module integration/dra-sim
if command -v gcc >/dev/null; then
  step "race detector" make race ARGS=-short
else
  echo "skipped: gcc is missing, which the race detector needs"
fi
if root; then
  # The quick tests include all plugins; the other packages depend most on the user. `make user` runs everything.
  step "quick tests and demo as an ordinary user" env SHARED=1 scripts/as-user.sh \
    "make quick && make demo && PACKAGES='./integration/demo ./pkg/kernel ./pkg/cli/sandbox ./integration/snapshot' scripts/test.sh -short"
  step "real containerd" env PODLACE_BIN="$PWD/bin" go -C integration/e2e/containerd test -trimpath -count=1 -timeout 15m ./...
  step "real kubelet" make node
  step "real API server" make apiserver
fi
step "the machine is as before" machine_unchanged

printf '\n=== done\n'
printf '%s\n' "${rows[@]}"
echo "${#rows[@]} steps in $((SECONDS / 60)) min $((SECONDS % 60)) s, $failed failed"
[ "$failed" -eq 0 ]
