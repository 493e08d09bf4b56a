#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ci.sh: runs every check of the project, and prints the duration of each. As root on Debian, ci.sh installs the required
# programs. Elsewhere ci.sh uses the installed programs, and the tests print which tests they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
steps=()
step() {
  printf '\n=== %s (%d s)\n' "$*" "$SECONDS"
  steps+=("$SECONDS $*")
}

root() { [ "$(id -u)" -eq 0 ]; }

# Root can install every tool, so a skip because of a missing tool is an error.
if root; then
  step install tools
  scripts/ci-install.sh
  export KERNELTEST=require
fi

step lint
make lint

step test as "$(id -un)"
make test

step demo as "$(id -un)"
make demo

step install into a folder
folder=$(mktemp -d)
make install DESTDIR="$folder" >/dev/null
ls "$folder/opt/cni/bin" "$folder/usr/local/bin"
make uninstall DESTDIR="$folder" >/dev/null
rmdir "$folder"

step soak
make soak ARGS='-seed 1 -for 45s'

step image and manifest
go -C scripts/image test -trimpath -count=1 ./...

step queries of the dashboard and the alerting rules
go -C integration/monitoring test -trimpath -count=1 ./...

step slices, classes and claims by Kubernetes itself
go -C integration/dra-sim test -trimpath -count=1 ./...

step race detector
if command -v gcc >/dev/null; then
  make race
else
  echo "skipped: gcc is missing, which the race detector needs"
fi

if root; then
  # The other packages behave the same for every user. integration calls the plugins as root, as a runtime does.
  step tests of packages that depend on the user, and demo, as an ordinary user
  packages=(attachment bandwidth bridge demo hostlocal ipam iptables kernel/... loopback portmap reconcile reference rollback sandbox sriov)
  scripts/as-user.sh -test "${packages[@]/#/./pkg/}"

  step real containerd
  (cd integration/e2e/containerd && PODLACE_BIN="$OLDPWD/bin" go test -trimpath -count=1 -timeout 15m ./...)

  step real kubelet
  make node

  step real API server
  make apiserver
fi

step benchmark, one round to see that it runs
make bench ARGS='-rounds 1 -scale 0.02'

step done
for ((i = 0; i + 1 < ${#steps[@]}; i++)); do
  printf '%6d s  %s\n' $((${steps[i + 1]%% *} - ${steps[i]%% *})) "${steps[i]#* }"
done
echo "$SECONDS s in all, load $(cut -d ' ' -f 1-3 /proc/loadavg)"
