#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# test.sh [go test flags]: fills the folder $VM with setup.sh, and runs tests in the virtual machine of this folder. Each test binary of
# "make test" runs in a separate machine. Without $PACKAGES, test.sh runs the packages that need optional kernel features; with
# KERNELTEST=full a missing feature is a failure. CARD=1 adds network cards with VFs to the machine of $PACKAGES.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VM PODLACE_BIN=$PWD/bin PODLACE_TOOLS=$PWD/build/test KERNELTEST=full
# Loaded in advance, because some modules would add sysctls in the middle of a test, and others would be loaded by programs, which a user
# namespace forbids.
export VM_MODULES="${VM_MODULES-nf_conntrack br_netfilter 8021q tun ip_tables ip6_tables}"
scripts/vm/setup.sh "$VM"
# Build these on the host, because a build in the machine takes long.
CGO_ENABLED=0 go build -buildvcs=false -tags podlace_fault -o build/test/fault/ ./plugins/sriov
if [ -n "${PACKAGES:-}" ]; then
  exec scripts/test.sh -exec "$PWD/scripts/vm/$([ -z "${CARD:-}" ] && echo exec || echo card).sh" -count=1 -timeout 90m "$@"
fi
status=0
PACKAGES='./pkg/kernel ./pkg/bridge ./pkg/bandwidth' scripts/test.sh -exec "$PWD/scripts/vm/exec.sh" -count=1 -timeout 90m "$@" || status=1
PACKAGES='./integration/plugins' scripts/test.sh -exec "$PWD/scripts/vm/exec.sh" -count=1 -timeout 90m -run 'TestScripts/(bridge|portmap|gc)' "$@" || status=1
PACKAGES='./pkg/kernel ./pkg/pci ./pkg/sriov ./pkg/daemon/deviceplugin' scripts/test.sh -exec "$PWD/scripts/vm/card.sh" -count=1 -timeout 90m -run 'TestNIC|TestLife|TestIGB' "$@" || status=1
exit "$status"
