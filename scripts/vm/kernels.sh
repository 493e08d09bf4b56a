#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# kernels.sh [KERNEL...]: runs the tests of integration/kernels in the virtual machine in $VM, once on each given kernel, or on each kernel of
# scripts/vm/kernels. It prints a table, and fails if a kernel fails. The output of each kernel is in build/kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VM PODLACE_BIN=$PWD/bin
mapfile -t kernels < <(grep -v '^#' scripts/vm/kernels | cut -d ' ' -f 1 | uniq)
[ $# -eq 0 ] || kernels=("$@")
scripts/vm/setup.sh "$VM" "${kernels[@]}"
mkdir -p build/kernels
CGO_ENABLED=0 go test -buildvcs=false -c -o build/kernels/test ./integration/kernels
CGO_ENABLED=0 go build -buildvcs=false -o build/kernels/demo ./integration/demo

# On a node, plugins run as root outside of user namespaces, and the kernel loads modules for them. Under emulation, each takes seconds, and
# a transaction that needs several exceeds the plugins' timeout, so they are loaded in advance. Kubernetes' documentation asks for
# br_netfilter.
modules='br_netfilter nf_conntrack_netlink nft_chain_nat nft_compat nft_ct nft_fib_inet nft_masq nft_meta_bridge nft_nat'
table='kernel|release|result|tests passed|failed|lacks|seconds'
failed=0
for kernel in "${kernels[@]}"; do
  log=build/kernels/$kernel.log start=$SECONDS result=passed
  echo "=== Linux $kernel, to $log (load $(cut -d ' ' -f 1 /proc/loadavg))"
  PODLACE_KERNEL=$kernel VM_LINUX=$kernel VM_MODULES=$modules VM_TIMEOUT=2400 scripts/vm/exec.sh sh -c \
    'echo "release: $(uname -r)"; echo 0 >/proc/sys/user/max_user_namespaces; cd integration/kernels; exec ../../build/kernels/test -test.v -test.timeout 35m' \
    >"$log" 2>&1 || result=FAILED
  passes=$(grep -c '^ *--- PASS' "$log" || true) fails=$(grep -c '^ *--- FAIL' "$log" || true)
  [ "$passes" -gt 0 ] || result=FAILED # a run without tests is no success
  if [ "$result" = passed ]; then
    grep -E '^ *--- |^ +[a-z_]+\.go:[0-9]+: ' "$log"
  else
    failed=$((failed + 1))
    cat "$log"
  fi
  table+=$'\n'"$kernel|$(sed -n 's/^release: //p' "$log")|$result|$passes|$fails|$(sed -n 's/.* lacks: //p' "$log" | paste -sd ';' | sed 's/;/; /g')|$((SECONDS - start))"
done
echo
column -t -s '|' <<<"$table"
echo "$((${#kernels[@]} - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
