#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# kernels.sh [KERNEL...]: runs the tests of integration/kernels in the virtual machine in $VM, once on each given kernel, or on each kernel of
# scripts/vm/kernels. It prints a table, and fails if a kernel fails. The output of each kernel is in build/kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VM PODLACE_BIN=$PWD/bin PODLACE_TOOLS=$PWD/build/tools KERNELTEST=require
mapfile -t kernels < <(grep -v '^#' scripts/vm/kernels | cut -d ' ' -f 1 | uniq)
[ $# -eq 0 ] || kernels=("$@")
scripts/vm/setup.sh "$VM" "${kernels[@]}"
mkdir -p build/tools build/kernels
CGO_ENABLED=0 go test -buildvcs=false -c -o build/tools/kernels.test ./integration/kernels

# On a node, plugins run as root outside of user namespaces, and the kernel loads modules for them. Emulated, a module takes seconds, and a
# transaction that needs several exceeds the plugins' timeout, so these are loaded in advance. Kubernetes' documentation asks for br_netfilter.
modules='br_netfilter nf_conntrack_netlink nft_chain_nat nft_compat nft_ct nft_fib_inet nft_masq nft_meta_bridge nft_nat'
table=$(mktemp)
trap 'rm -f "$table"' EXIT
status=0
for kernel in "${kernels[@]}"; do
  log=build/kernels/$kernel.log start=$SECONDS result=passed
  PODLACE_KERNEL=$kernel VM_LINUX=$kernel VM_MODULES=$modules VM_TIMEOUT=1800 scripts/vm/exec.sh sh -c \
    'echo "release: $(uname -r)"; echo 0 >/proc/sys/user/max_user_namespaces; cd integration/kernels; exec ../../build/tools/kernels.test -test.v -test.timeout 25m' \
    >"$log" 2>&1 || { result=FAILED status=1; cat "$log"; }
  # A run without a passed test is no success.
  grep -q '^ *--- PASS' "$log" || result=FAILED status=1
  grep -E '^ *--- |^ +[a-z_]+\.go:[0-9]+: ' "$log" || true
  echo "$kernel|$(sed -n 's/^release: //p' "$log")|$result|$(grep -c '^ *--- PASS' "$log" || true)|$(grep -c '^ *--- FAIL' "$log" || true)|$((SECONDS - start))" >>"$table"
done
echo
{ echo 'kernel|release|result|passed|failed|seconds'; cat "$table"; } | column -t -s '|'
exit "$status"
