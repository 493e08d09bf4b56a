#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# kubelet.sh FOLDER: prints the path of the kubelet that the tests run, and builds it before if the folder does not have it. Its version and
# all that it is made of stand in integration/e2e/kubelet/build/go.mod. The first build takes 6 to 10 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/../integration/e2e/kubelet/build"
version=$(awk '$1 == "require" && $2 == "k8s.io/kubernetes" {print $3}' go.mod)
kubelet=$1/kubelet-$version
if [ ! -x "$kubelet" ]; then
  echo "building the kubelet $version, once: this takes 6 to 10 minutes" >&2
  mkdir -p "$1"
  new=$(mktemp "$1/.kubelet-XXXXXX")
  trap 'rm -f "$new"' EXIT
  number=${version#v}
  minor=${number#*.}
  at=k8s.io/component-base/version
  CGO_ENABLED=0 GOFLAGS= go build -mod=readonly -trimpath -o "$new" -ldflags "-s -w -X $at.gitVersion=$version -X $at.gitMajor=${number%%.*} \
    -X $at.gitMinor=${minor%%.*} -X k8s.io/client-go/pkg/version.gitVersion=$version" k8s.io/kubernetes/cmd/kubelet
  chmod 755 "$new"
  mv "$new" "$kubelet"
fi
echo "$kubelet"
