#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh FOLDER: fills the folder with QEMU, a distribution kernel, its modules and an initial RAM disk, from Debian packages. setup.sh
# unpacks the packages only in this folder and installs nothing. The download is about 125 MB. A further run does nothing until
# this script changes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)

recipe=$(cat "$here"/{setup.sh,modules,packages} "$tree"/integration/harness/vm/*.go | sha256sum | cut -c 1-16)
exec 9>"$folder/lock"
flock 9
[ "$(cat "$folder/recipe" 2>/dev/null)" != "$recipe" ] || exit 0
for tool in apt-get dpkg-deb zstd xz strip python3; do
  command -v "$tool" >/dev/null || { echo "$0: $tool is missing; the virtual machine is made of Debian packages" >&2; exit 1; }
done
echo "making the virtual machine in $folder, once"
rm -rf "$folder"/{recipe,apt,packages,qemu,kernel,modules,bin,vmlinux,initrd}
mkdir -p "$folder"/{apt/{sources,lists/partial,cache/archives/partial},packages,qemu,kernel,bin}

# apt with private lists and a private cache. It verifies downloads by the archive's signature.
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
for suite in bookworm bookworm-backports; do
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $suite main"
done >"$folder/apt/sources/debian.list"
cat >"$folder/apt/apt.conf" <<EOF
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$folder/apt/sources";
Dir::State::Lists "$folder/apt/lists";
Dir::Cache "$folder/apt/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
EOF
export APT_CONFIG=$folder/apt/apt.conf
apt-get update -qq

# Debian's archive keeps only the newest version of a package, so a pinned version can disappear. The script then uses the newest
# version and prints a message.
cd "$folder/packages"
wanted=()
while read -r name version _; do
  if apt-cache show "$name=$version" >/dev/null 2>&1; then
    wanted+=("$name=$version")
    continue
  fi
  echo "$name $version is not in the archive any more, taking the newest"
  case $name in
    linux-image-*) wanted+=("$(apt-cache search --names-only '^linux-image-6\..*\+deb12-amd64-unsigned$' | cut -d ' ' -f 1 | sort -V | tail -1)") ;;
    *) wanted+=("$(apt-cache madison "$name" | awk -v name="$name" 'NR == 1 {print name "=" $3}')") ;;
  esac
done < <(grep -v '^#' "$here/packages")
apt-get download -qq "${wanted[@]}"
while read -r name version sum; do
  for file in "$name"_*.deb; do
    [ ! -e "$file" ] || [ "$(dpkg-deb -f "$file" Version)" != "$version" ] || echo "$sum  $file" | sha256sum --check --quiet
  done
done < <(grep -v '^#' "$here/packages")
for file in *.deb; do
  case $file in linux-image*) dpkg-deb -x "$file" "$folder/kernel" ;; *) dpkg-deb -x "$file" "$folder/qemu" ;; esac
done
cp "$folder/qemu/bin/kmod" "$folder/bin/modprobe"
cp "$folder/qemu/bin/kmod" "$folder/bin/depmod"

# The uncompressed kernel: under emulation, decompression at each start takes longer than the rest of the boot.
image=$(echo "$folder"/kernel/boot/vmlinuz-*)
release=${image#*/vmlinuz-}
for offset in $(LC_ALL=C grep -aboP '\x28\xb5\x2f\xfd' "$image" | cut -d : -f 1); do
  tail -c +$((offset + 1)) "$image" | zstd -dcq >"$folder/vmlinux" 2>/dev/null || true
  [ "$(head -c 4 "$folder/vmlinux" | tail -c 3)" != ELF ] || break
done

# The required modules and their dependencies, uncompressed and without debug information, because these load much faster.
from=$folder/kernel/lib/modules/$release
to=$folder/modules/lib/modules/$release
mkdir -p "$to"
cp "$from"/modules.{builtin,builtin.modinfo,order} "$to"
"$folder/bin/depmod" -b "$folder/kernel" "$release"
grep -v '^#' "$here/modules" | tr ' ' '\n' | python3 -c '
import os, sys
needs = dict(line.rstrip("\n").split(":", 1) for line in open(sys.argv[1]))
path = {os.path.basename(p).split(".")[0].replace("-", "_"): p for p in needs}
for name in sys.stdin.read().split():
    p = path.get(name.replace("-", "_"))
    print(*([p] + needs[p].split() if p else []), sep="\n")' "$from/modules.dep" | sort -u | while read -r module; do
  [ -n "$module" ] || continue
  mkdir -p "$to/$(dirname "$module")"
  xz -dc "$from/$module" >"$to/${module%.xz}"
  strip -g "$to/${module%.xz}"
done
"$folder/bin/depmod" -b "$folder/modules" "$release"

(cd "$tree" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$folder/bin/guest" ./integration/harness/vm)
"$folder/bin/guest" -modules "$to" -load 9p,9pnet_virtio,overlay -out "$folder/initrd"
rm -rf "$folder"/{kernel,apt,packages}
echo "$recipe" >"$folder/recipe"
