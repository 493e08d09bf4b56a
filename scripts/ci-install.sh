#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ci-install.sh [nightly]: installs, on Debian as root, the programs that the tests use besides Go and the kernel. With "nightly", also
# those of the long targets.
set -euo pipefail
packages=(nftables iptables iproute2 containerd runc busybox-static util-linux strace gcc libc6-dev openssl procps)
[ "${1:-}" != nightly ] || packages+=(conmon skopeo qemu-user-static rpm chromium-headless-shell zstd xz-utils binutils python3 bsdextrautils)
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
echo "installing ${missing[*]}"
# Services must not start: the tests run their own copies in private namespaces.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
