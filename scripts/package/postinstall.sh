#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# After an upgrade, daemons that run become the new program. Nothing is enabled.
[ -d "${DPKG_ROOT:-}/run/systemd/system" ] || exit 0
systemctl daemon-reload || :
systemctl try-restart podlace-reload.service podlace-node.service || :
