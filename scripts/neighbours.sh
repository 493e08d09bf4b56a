#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# neighbours.sh FOLDER: prints a folder with firewalld, Docker and what they need besides the packages of this machine. Debian's packages
# are downloaded once and unpacked there; nothing is installed or started.
set -euo pipefail
folder=$(realpath -m "${1:?usage: neighbours.sh FOLDER}")
for tool in apt-get dpkg-deb; do
  command -v $tool >/dev/null || { echo "$0: $tool is missing; firewalld and Docker are Debian packages" >&2; exit 1; }
done
shopt -s nullglob # a machine that has all packages needs none
apt=(apt-get -qq --no-install-recommends install firewalld docker.io dbus-daemon iptables)
key=$("${apt[@]}" --print-uris | cat "$0" - | sha256sum | cut -c 1-12)
to=$folder/$key
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
if [ ! -e "$to" ]; then
  echo "unpacking firewalld, Docker and their dependencies into $to, once: about a minute" >&2
  new=$folder/.new # this process has the lock, so the files here are from an interrupted run
  rm -rf "$new"
  mkdir -p "$new"/{archives/partial,root/usr/sbin}
  "${apt[@]}" --download-only -o Dir::Cache::archives="$new/archives" -o APT::Sandbox::User=root >&2 ||
    { echo "$0: no download: apt-get update" >&2; exit 1; }
  for deb in "$new"/archives/*.deb; do dpkg-deb -x "$deb" "$new/root"; done
  for d in bin lib sbin; do # of /usr since Debian 12
    [ ! -d "$new/root/$d" ] || { cp -a "$new/root/$d" "$new/root/usr/" && rm -r "$new/root/$d"; }
  done
  # firewalld and Docker load modules, which belong to the whole machine.
  printf '#!/bin/sh\n' >"$new/root/usr/sbin/modprobe"
  chmod +x "$new/root/usr/sbin/modprobe"
  mv "$new/root" "$to"
  rm -rf "$new"
fi
echo "$to"
