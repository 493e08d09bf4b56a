#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [go test flags]: runs tests in the virtual machine of the folder $VM, which is filled first: the same test binaries as "make
# test" runs, each in a machine of its own. Without $PACKAGES it runs those that need features which a kernel can lack; with
# KERNELTEST=full it is a failure there when one is missing. CARD=1 gives the machine for $PACKAGES network cards with VFs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VM PODLACE_BIN=$PWD/bin PODLACE_TOOLS=$PWD/build/tools KERNELTEST=full
# Loaded on demand some would bring sysctls in the middle of a test; others are loaded by programs, which must not in a user namespace.
export VM_MODULES="${VM_MODULES-nf_conntrack br_netfilter 8021q tun ip_tables ip6_tables}"
scripts/vm/setup.sh "$VM"
# What integration tests would build themselves, which takes long in the machine.
CGO_ENABLED=0 go build -buildvcs=false -tags podlace_fault -o build/tools/fault/ ./plugins/sriov
if [ -n "${PACKAGES:-}" ]; then
  exec scripts/test.sh -exec "$PWD/scripts/vm/$([ -z "${CARD:-}" ] && echo exec || echo card).sh" -count=1 -timeout 90m "$@"
fi
status=0
PACKAGES='./pkg/kernel ./pkg/bridge ./pkg/bandwidth' scripts/test.sh -exec "$PWD/scripts/vm/exec.sh" -count=1 -timeout 90m "$@" || status=1
PACKAGES='./integration/plugins' scripts/test.sh -exec "$PWD/scripts/vm/exec.sh" -count=1 -timeout 90m -run 'TestScripts/(bridge|portmap|gc)' "$@" || status=1
PACKAGES='./pkg/kernel ./pkg/pci ./pkg/sriov ./pkg/deviceplugin' scripts/test.sh -exec "$PWD/scripts/vm/card.sh" -count=1 -timeout 90m -run 'TestNIC|TestLife|TestIGB' "$@" || status=1
exit "$status"
