#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# sim-oracle.sh FOLDER [-if-built | -update] [flags of the oracle]: records what Kubernetes' own code decides and compares the port in
# integration/sim/kubelet with it. The recorder is built once into the folder; where the kubelet was built before, that takes half a minute,
# else as long as a kubelet. -if-built builds nothing, -update replaces the recording that the tests compare with always.
set -euo pipefail
folder=$1
shift
cd "$(dirname "$0")/../integration/sim"
mode=${1:-}
case $mode in
  -if-built | -update) shift ;;
  *) mode= ;;
esac
version=$(awk '$1 == "k8s.io/kubernetes" {print $2; exit}' oracle/go.mod)
oracle=$folder/oracle-$version-$(cat oracle/*.go oracle/go.* | sha256sum | cut -c 1-12)
if [ ! -x "$oracle" ]; then
  if [ "$mode" = -if-built ]; then
    echo "1 skipped: the recorder is not in $folder (make sim-oracle builds it); the port was compared with the recording of the tree alone"
    exit
  fi
  mkdir -p "$folder"
  new=$(mktemp "$folder/.oracle-XXXXXX")
  trap 'rm -f "$new"' EXIT
  (cd oracle && CGO_ENABLED=0 GOFLAGS= go build -mod=readonly -trimpath -buildvcs=false -ldflags '-s -w' -o "$new" .)
  chmod 755 "$new"
  rm -f "$folder"/oracle-*
  mv "$new" "$oracle"
fi
recording=$PWD/kubelet/testdata/recording.json.gz
mkdir -p "${recording%/*}"
if [ "$mode" != -update ]; then
  recording=$(mktemp)
  trap 'rm -f "$recording"' EXIT
  [ $# -gt 0 ] || set -- -seed "$(date +%s)" -merges 20000 -nodes 400 -pods 40
fi
echo "oracle $*"
"$oracle" "$@" | gzip -n9 >"$recording"
KUBELET_RECORDING=$recording go test -buildvcs=false -count=1 -v -run TestRecording ./kubelet
