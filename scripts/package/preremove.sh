#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a removal, dpkg gives the argument "remove" and rpm 0; both also run this script before an upgrade.
case $1 in remove | 0) ;; *) exit 0 ;; esac
[ -d "${DPKG_ROOT:-}/run/systemd/system" ] || exit 0
systemctl disable --now podlace-reload.service podlace-node.service podlace-gc.timer sriov-device-plugin.service || :
