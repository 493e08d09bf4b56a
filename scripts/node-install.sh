#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# node-install.sh installs, with apt-get, what node.sh and the tests of
# integration/containerd run: containerd, runc, a static busybox, iproute2.
# It does nothing when all is there, and needs root otherwise.
set -eu

static_busybox() {
	busybox=$(command -v busybox) && ! ldd "$busybox" >/dev/null 2>&1
}

packages=
want() { packages="$packages $1"; }
{ command -v containerd && command -v ctr; } >/dev/null || want containerd
command -v runc >/dev/null || want runc
command -v ip >/dev/null || want iproute2
{ command -v unshare && command -v nsenter && command -v setpriv; } >/dev/null || want util-linux
static_busybox || want busybox-static
[ -n "$packages" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "node-install.sh: missing:$packages; install them as root" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # one word a package
apt-get install -y -qq --no-install-recommends $packages
