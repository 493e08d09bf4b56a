#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# make-cluster.sh CACHE [-test [go test flags]]: starts a cluster with Podlace and opens a shell in its control plane, or runs the tests of
# integration/e2e/kubernetes, which start their own clusters. Kubernetes, etcd and containerd are built into the cache if missing.
# make-cluster.sh check [ARGS]: exits with status 0 if the machine can run a cluster and the arguments are valid. Otherwise it prints the reason.
#
# IMAGE     name of Podlace's image in build/image.tar (make image)
# CRIO      1, or a folder of crio and pinns: node3 runs CRI-O in the shell's cluster, and in the test of CRI-O
# MANIFEST  manifest to apply (default: the shipped manifest, with VXLAN to nodes in another subnet)
# FLANNEL   folder of flannel's programs, for TestFlannel (default: built if ARGS name the test)
set -euo pipefail
cd "$(dirname "$0")/.."
cache=$1
shift
case "${1:-}" in
-test | "") ;;
*)
  echo "make cluster: unknown argument $1: ARGS may be empty, for a shell, or '-test [flags of go test]'" >&2
  exit 2
  ;;
esac
scripts/cluster.sh check # check before the build, which takes minutes
[ "$cache" != check ] || exit 0
KUBERNETES=$(scripts/programs.sh "$cache/programs" kubernetes)
CONTAINERD=${CONTAINERD:-$(scripts/programs.sh "$cache/programs" containerd)/containerd}
[ "${CRIO:-}" != 1 ] || CRIO=$(scripts/crio.sh "$cache/crio")
export KUBERNETES CONTAINERD CRIO=${CRIO:-} PODLACE_BIN=${PODLACE_BIN:-$PWD/bin}
case "$*" in
*Flannel*)
  FLANNEL=${FLANNEL:-$(scripts/programs.sh "$cache/programs" flannel)}
  export FLANNEL
  ;;
esac
case "$*" in
*Flannel* | *Removal*)
  scripts/reference.sh build/reference
  export REFERENCE=$PWD/build/reference
  ;;
esac
dir=$(mktemp -d /tmp/podlace-cluster-XXXXXX)
finish() {
  [ ! -e "$dir/pid" ] || scripts/cluster.sh down "$dir"
  rm -rf "$dir"
}
trap finish EXIT

# The image of the sandboxes and of the tests' pods contains only busybox.
busybox=$(command -v busybox)
mkdir -p "$dir/bin" "$dir/images"
cp "$busybox" "$dir/bin/busybox"
for applet in $("$busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$dir/bin/$applet"; done
go build -C scripts/image -o "$dir/image" .
# shellcheck disable=SC2016
"$dir/image" pack -name podlace.test/busybox:1 -out "$dir/images/busybox.tar" -env PATH=/bin -entrypoint /bin/sh -entrypoint -c \
  -entrypoint 'trap "exit 0" TERM INT; while :; do sleep 3600 & wait $!; done' "/bin=$dir/bin" dir:/tmp=1777
ln -s "$PWD/build/image.tar" "$dir/images/podlace.tar"
if [ -z "${MANIFEST:-}" ]; then
  MANIFEST=$dir/podlace.yaml
  "$dir/image" manifest -conf conf/cluster -image "$IMAGE" -component vxlan -out "$MANIFEST"
fi
export MANIFEST

if [ "${1:-}" = -test ]; then
  shift
  DNS=$(scripts/programs.sh "$cache/programs" e2e dns)/dns
  export DNS
  IMAGES=$dir/images go test -buildvcs=false -count=1 -v -timeout 40m ./integration/e2e/kubernetes "$@"
else
  scripts/cluster.sh up "$dir" | grep -vx ready
  scripts/cluster.sh exec "$dir" plane kubectl apply -f "$MANIFEST"
  scripts/cluster.sh exec "$dir" plane kubectl wait --for=condition=Ready nodes --all --timeout=60s
  echo "a shell in the control plane, with kubectl; the cluster ends with it"
  scripts/cluster.sh exec "$dir" plane bash || :
fi
