#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# crio.sh FOLDER: builds CRI-O, its helper pinns and crictl for the tests, if they are missing, and prints their folder. The file
# integration/e2e/programs/crio/go.mod pins the versions of CRI-O and its dependencies. The first build takes 4 to 7 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/../integration/e2e/programs/crio"
version=$(awk '$1 == "github.com/cri-o/cri-o" {print $2}' go.mod)
folder=$1/crio-$version
if [ ! -x "$folder/crio" ]; then
  echo "building CRI-O $version, once: this takes 4 to 7 minutes" >&2
  mkdir -p "$1"
  new=$(mktemp -d "$1/.crio-XXXXXX")
  trap 'rm -rf "$new"' EXIT
  export GOFLAGS=
  build() {
    go build -mod=readonly -trimpath -buildvcs=false -o "$new" "$@"
  }
  # Without the tags seccomp, selinux and apparmor CRI-O links only libc.
  CGO_ENABLED=1 build -ldflags '-s -w' -tags 'containers_image_openpgp containers_image_ostree_stub exclude_graphdriver_btrfs' \
    github.com/cri-o/cri-o/cmd/crio
  CGO_ENABLED=0 build -ldflags '-s -w' sigs.k8s.io/cri-tools/cmd/crictl
  gcc -std=c99 -Os -static -s -o "$new/pinns" "$(go list -mod=readonly -m -f '{{.Dir}}' github.com/cri-o/cri-o)"/pinns/src/*.c
  chmod 755 "$new"
  mv "$new" "$folder"
fi
echo "$folder"
