#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the reference plugins, at the version that integration/reference/go.mod pins, into build/reference (or the folder given).
# The flags equal the flags of bin/ (static, stripped), so that sizes and times are comparable.
set -eu

cd "$(dirname "$0")/.."
mkdir -p "${1:-build/reference}"
out=$(realpath "${1:-build/reference}")
CGO_ENABLED=0 go build -C integration/reference -trimpath -ldflags '-s -w' -o "$out/" tool
