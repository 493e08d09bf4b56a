#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# setup.sh FOLDER [KERNEL...]: fills the folder with QEMU and with kernels of the file "kernels" (default: 6.12), from Debian packages. It
# unpacks the packages only in this folder and installs nothing. QEMU is 25 MB of download, each kernel 57 to 121 MB. A further run does
# nothing until this script or one of its files changes.
#   FOLDER/qemu, FOLDER/bin   QEMU; modprobe and the first process of the guest
#   FOLDER/linux-KERNEL       vmlinux, modules and initial RAM disk of one kernel
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- 6.12

# The version of a part of the folder: the hash of all that the part is made by.
recipe() { cat "$here/setup.sh" "$tree"/integration/harness/vm/*.go "$@" | sha256sum | cut -c 1-16; }
complete() { [ "$(cat "$folder/$1/recipe" 2>/dev/null)" = "$2" ]; }

rows() { grep -v '^#' "$here/$1"; }
kernel_rows() { rows kernels | awk -v name="$1" '$1 == name'; }

# apt with private lists of some suites and a private cache. It verifies downloads by the archive's signature.
prepare_apt() {
  local suite mirror
  rm -rf "$folder/apt"
  mkdir -p "$folder"/apt/{sources,lists/partial,cache/archives/partial,unpacked}
  for suite in "$@"; do
    mirror=$(awk -v security="$([[ $suite != *-security ]] || echo -security)" '/^URIs:/ && ($2 ~ /-security\/?$/) == (security != "") {print $2; exit}' \
      /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
    [[ $suite != *-security ]] || mirror=${mirror:-http://deb.debian.org/debian-security}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $suite main"
  done >"$folder/apt/sources/debian.list"
  cat >"$folder/apt/apt.conf" <<END
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$folder/apt/sources";
Dir::State::Lists "$folder/apt/lists";
Dir::Cache "$folder/apt/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
END
  export APT_CONFIG=$folder/apt/apt.conf
  apt-get update -qq
}

# newest PACKAGE: what the archive has in place of a pinned package; for a kernel, those of the suite's newest one. From 7.2 on, Debian's
# package of a kernel has no files, and depends on the packages that have them.
newest() {
  local image
  case $1 in
    linux-*)
      image=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image-[0-9]/ {print $2}')
      echo "$image"
      apt-cache depends "$image" | awk '$1 == "Depends:" && $2 ~ /^linux-(base|binary|modules)-[0-9]/ {print $2}'
      ;;
    *) apt-cache madison "$1" | awk -v name="$1" 'NR == 1 {print name "=" $3}' ;;
  esac
}

# unpack SUITE...: downloads the packages of standard input (name, version, SHA-256) and unpacks them into apt/unpacked. Debian's archive
# keeps only the newest version, so if a pinned one is gone, unpack takes the newest and says so.
unpack() {
  local pins name version sum file wanted=()
  pins=$(cat)
  prepare_apt "$@"
  while read -r name version _; do
    if apt-cache show "$name=$version" >/dev/null 2>&1; then
      wanted+=("$name=$version")
      continue
    fi
    echo "$name $version is not in the archive any more, taking the newest"
    mapfile -t -O "${#wanted[@]}" wanted < <(newest "$name")
  done <<<"$pins"
  cd "$folder/apt"
  mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | sort -u)
  apt-get download -qq "${wanted[@]}"
  while read -r name version sum; do
    for file in "$name"_*.deb; do
      [ ! -e "$file" ] || [ "$(dpkg-deb -f "$file" Version)" != "$version" ] || echo "$sum  $file" | sha256sum --check --quiet
    done
  done <<<"$pins"
  for file in *.deb; do dpkg-deb -x "$file" unpacked; done
}

make_qemu() {
  rm -rf "$folder"/{qemu,bin}
  rows packages | unpack bookworm bookworm-backports
  mkdir "$folder/bin"
  mv "$folder/apt/unpacked" "$folder/qemu"
  cp "$folder/qemu/bin/kmod" "$folder/bin/modprobe"
  cp "$folder/qemu/bin/kmod" "$folder/bin/depmod"
  (cd "$tree" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags='-s -w' -o "$folder/bin/guest" ./integration/harness/vm)
}

# uncompress FILE: prints the kernel in a compressed image, or a module.
uncompress() {
  case $1 in
    *.ko) cat "$1" ;;
    *.ko.xz) xz -dc "$1" ;;
    *.ko.zst) zstd -dcq "$1" ;;
    *)
      local magic offset
      for magic in '\x28\xb5\x2f\xfd zstd -dcq' '\xfd7zXZ\x00 xz -dcq'; do
        for offset in $(LC_ALL=C grep -aboP "${magic%% *}" "$1" | cut -d : -f 1); do
          tail -c +$((offset + 1)) "$1" | ${magic#* } >"$folder/apt/vmlinux" 2>/dev/null || true # other data follows the kernel
          if [ "$(head -c 4 "$folder/apt/vmlinux" | tail -c 3)" = ELF ]; then cat "$folder/apt/vmlinux" && return; fi
        done
      done
      echo "$0: found no kernel in $1" >&2
      return 1
      ;;
  esac
}

# The required modules and their dependencies, by the list of depmod.
required_modules() {
  rows modules | tr ' ' '\n' | python3 -c '
import os, sys
needs = dict(line.rstrip("\n").split(":", 1) for line in open(sys.argv[1]))
path = {os.path.basename(p).split(".")[0].replace("-", "_"): p for p in needs}
for name in sys.stdin.read().split():
    p = path.get(name.replace("-", "_"))
    print(*([p] + needs[p].split() if p else []), sep="\n")' "$1" | sed '/^$/d' | sort -u
}

make_kernel() {
  local name=$1 to=$folder/linux-$1 from release image module
  rm -rf "$to"
  # shellcheck disable=SC2046 # the suites are words
  kernel_rows "$name" | cut -d ' ' -f 3- | unpack $(kernel_rows "$name" | cut -d ' ' -f 2 | sort -u)
  [ -d "$folder/apt/unpacked/lib" ] || ln -s usr/lib "$folder/apt/unpacked/lib"
  from=$(echo "$folder"/apt/unpacked/lib/modules/*)
  release=${from##*/}
  mkdir -p "$to/modules/lib/modules/$release"
  # The kernel and the modules are uncompressed and without debug information: under emulation, these load much faster.
  for image in "$from/vmlinuz" "$folder/apt/unpacked/boot/vmlinuz-$release"; do
    [ ! -e "$image" ] || uncompress "$image" >"$to/vmlinux"
  done
  cp "$from"/modules.{builtin,builtin.modinfo,order} "$to/modules/lib/modules/$release"
  "$folder/bin/depmod" -b "$folder/apt/unpacked" "$release"
  required_modules "$from/modules.dep" | while read -r module; do
    mkdir -p "$to/modules/lib/modules/$release/$(dirname "$module")"
    uncompress "$from/$module" >"$to/modules/lib/modules/$release/${module%.ko*}.ko"
    strip -g "$to/modules/lib/modules/$release/${module%.ko*}.ko"
  done
  "$folder/bin/depmod" -b "$to/modules" "$release"
  ln -s ../bin "$to/bin"
  "$folder/bin/guest" -modules "$to/modules/lib/modules/$release" -load virtio_pci,virtio_console,9p,9pnet_virtio,overlay -out "$to/initrd"
}

# part NAME RECIPE COMMAND...: makes a part of the folder unless it is complete.
part() {
  local name=$1 recipe=$2
  shift 2
  ! complete "$name" "$recipe" || return 0
  for tool in apt-get dpkg-deb zstd xz strip python3; do
    command -v "$tool" >/dev/null || { echo "$0: $tool is missing; the virtual machine is made of Debian packages" >&2; exit 1; }
  done
  echo "making $name of the virtual machine in $folder, once: some minutes"
  "$@"
  rm -rf "$folder/apt"
  echo "$recipe" >"$folder/$name/recipe"
}

exec 9>"$folder/lock"
flock 9
part qemu "$(recipe "$here/packages")" make_qemu
for kernel in "$@"; do
  [ -n "$(kernel_rows "$kernel")" ] || { echo "$0: no kernel $kernel; scripts/vm/kernels has: $(rows kernels | cut -d ' ' -f 1 | uniq | xargs)" >&2; exit 1; }
  part "linux-$kernel" "$(recipe "$here/modules" <(kernel_rows "$kernel"))" make_kernel "$kernel"
done
