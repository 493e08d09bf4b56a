#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the reference plugins, at the version that go.mod pins, into build/reference (or the folder given).
# They are built exactly as bin/ is (static, stripped), so that sizes and times compare.
set -eu

cd "$(dirname "$0")/.."
out=${1:-build/reference}
module=github.com/containernetworking/plugins/plugins

mkdir -p "$out"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out/" \
	"$module/main/bridge" \
	"$module/main/loopback" \
	"$module/ipam/host-local" \
	"$module/meta/portmap" \
	"$module/meta/bandwidth" \
	"$module/main/ptp" \
	"$module/main/macvlan" \
	"$module/meta/firewall" \
	"$module/meta/tuning" \
	"$module/ipam/static"
