#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the reference plugins, at the version that integration/reference/go.mod pins, into build/reference (or the folder given).
# They are built exactly as bin/ is (static, stripped), so that sizes and times compare.
set -eu

cd "$(dirname "$0")/.."
mkdir -p "${1:-build/reference}"
out=$(realpath "${1:-build/reference}")
CGO_ENABLED=0 go build -C integration/reference -trimpath -ldflags '-s -w' -o "$out/" tool
