#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# programs.sh FOLDER GROUP [PROGRAM..]: builds missing programs of other projects that the tests run, and prints their folder. Without
# PROGRAM, programs.sh builds the whole group. integration/e2e/programs pins the versions. Each version has a separate folder.
#
#   kubernetes  kubelet kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubectl etcd
#   kubernetes-1.34  kubelet kube-apiserver kube-controller-manager kube-scheduler: the oldest version in the DRA tests
#   e2e         agnhost regression-issue-74839 pause dns ginkgo e2e.test
#   containerd  containerd containerd-shim-runc-v2 ctr
#   flannel     flanneld flannel (its CNI plugin); needs gcc
#
# Minutes on 2 busy cores with empty caches: kubernetes 8, containerd 3, flannel 17, kubernetes-1.34 12; e2e after kubernetes: half a minute.
set -euo pipefail
die() {
  echo "programs.sh: $*" >&2
  exit 1
}
[ $# -ge 2 ] || die "usage: programs.sh FOLDER GROUP [PROGRAM..]"
folder=$(realpath -m "$1") group=$2
shift 2
cd "$(dirname "$0")/../integration/e2e/programs"
case $group in
kubernetes) module=kubernetes minutes=12 all="kubelet kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubectl etcd" ;;
kubernetes-1.34) module=kubernetes-1.34 minutes=12 all="kubelet kube-apiserver kube-controller-manager kube-scheduler" ;;
e2e) module=kubernetes minutes=10 all="agnhost regression-issue-74839 pause dns ginkgo e2e.test" ;;
containerd) module=containerd minutes=3 all="containerd containerd-shim-runc-v2 ctr" ;;
flannel) module=flannel minutes=3 all="flanneld flannel" ;;
*) die "no group $group: there are kubernetes, kubernetes-1.34, e2e, containerd and flannel" ;;
esac
cd "$module"
sources=
[ "$group" != e2e ] || sources=$(find dns e2e pause -name '*.go' | sort)
# shellcheck disable=SC2086
key=$(cat go.mod go.sum $sources | sha256sum | cut -c1-12)
to=$folder/$group-$key

# package PROGRAM prints the package of the program.
package() {
  case $1 in
  etcd) echo go.etcd.io/etcd/server/v3 ;;
  kube*) echo "k8s.io/kubernetes/cmd/$1" ;;
  agnhost | regression-issue-74839) echo "k8s.io/kubernetes/test/images/$1" ;;
  dns | pause) echo "./$1" ;;
  ginkgo) echo github.com/onsi/ginkgo/v2/ginkgo ;;
  containerd* | ctr) echo "github.com/containerd/containerd/v2/cmd/$1" ;;
  flanneld) echo github.com/flannel-io/flannel ;;
  flannel) echo github.com/containernetworking/plugins/plugins/meta/flannel ;;
  esac
}

# version MODULE prints the version that go.mod pins.
version() {
  go list -m -f '{{.Version}}' "$1"
}

# build PROGRAM.. builds all programs that have a Go package in one command, so that shared packages are compiled once.
build() {
  local packages=() p v number minor
  for p in "$@"; do packages+=("$(package "$p")"); done
  case $module in
  kubernetes*)
    v=$(version k8s.io/kubernetes) number=${v#v} minor=${v#*.}
    flags="-X k8s.io/component-base/version.gitVersion=$v -X k8s.io/component-base/version.gitMajor=${number%%.*} \
      -X k8s.io/component-base/version.gitMinor=${minor%%.*} -X k8s.io/client-go/pkg/version.gitVersion=$v"
    ;;
  containerd) flags="-X github.com/containerd/containerd/v2/version.Version=$(version github.com/containerd/containerd/v2)" ;;
  esac
  if [ "$module" = flannel ]; then # both package paths end in flannel; flanneld's backend udp is written in C
    for p in "$@"; do CGO_ENABLED=1 go build -mod=readonly -trimpath -ldflags "-s -w" -o "$new/$p" "$(package "$p")"; done
  elif [ "$*" = e2e.test ]; then
    go test -c -mod=readonly -trimpath -ldflags "-s -w $flags" -o "$new/e2e.test" ./e2e
  else
    go build -mod=readonly -trimpath -ldflags "-s -w $flags" -o "$new/" "${packages[@]}"
  fi
  [ ! -e "$new/server" ] || mv "$new/server" "$new/etcd" # the folder of etcd's package is named server
}

# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $all
mkdir -p "$folder"
exec 9>"$folder/.$group.lock"
flock 9 # another run may build the same programs
missing=()
for p in "$@"; do
  case " $all " in
  *" $p "*) [ -x "$to/$p" ] || missing+=("$p") ;;
  *) die "$group has no program $p: $all" ;;
  esac
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "building, once, ${missing[*]} into $to: up to $minutes minutes" >&2
  export CGO_ENABLED=0 GOFLAGS=
  new=$folder/.$group.new # this process has the lock, so the files here are from an interrupted build
  rm -rf "$new"
  mkdir -p "$new" "$to"
  plain=()
  for p in "${missing[@]}"; do
    [ "$p" = e2e.test ] || plain+=("$p")
  done
  start=$SECONDS
  [ ${#plain[@]} -eq 0 ] || build "${plain[@]}"
  [ ${#plain[@]} -eq ${#missing[@]} ] || build e2e.test
  for p in "${missing[@]}"; do mv "$new/$p" "$to/$p"; done
  rmdir "$new"
  echo "built in $((SECONDS - start)) s" >&2
fi
echo "$to"
