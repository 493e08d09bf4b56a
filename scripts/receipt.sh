# SPDX-License-Identifier: Apache-2.0
# receipt.sh: functions for the receipt of an installation, for install.sh and uninstall.sh. The receipt is a list for `sha256sum --check` with
# two kinds of comments: "#kept FILE COPY" names the copy of a replaced file, and "#made FOLDER" names a folder that the installation created.
# Tabs separate the fields. The paths are paths on the node, without DESTDIR.
declare -A sum=() kept=() made=()
destdir=${DESTDIR:-}
receipt=${RECEIPT:-}

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

exists() { [ -e "$1" ] || [ -L "$1" ]; }

# hash prints the SHA-256 of a file, or - if the file cannot be read.
hash() { sha256sum <"$1" 2>/dev/null | cut -d ' ' -f 1 | grep . || echo -; }

read_receipt() {
  local line kind path copy
  [ -n "$receipt" ] && [ -e "$receipt" ] || return 0
  while IFS= read -r line; do
    IFS=$'\t' read -r kind path copy <<<"$line"
    case $kind in
      '#kept') kept[$path]=$copy ;;
      '#made') made[$path]=1 ;;
      '#'*) ;;
      *) sum[${line:66}]=${line:0:64} ;;
    esac
  done <"$receipt"
}

# write_receipt replaces the receipt atomically, with a rename.
write_receipt() {
  local path
  [ -n "$receipt" ] || return 0
  make_folder "$(dirname "$receipt")"
  {
    echo "# What 'make install' of Podlace installed; 'sha256sum --check' verifies it and 'make uninstall' removes it."
    for path in "${!sum[@]}"; do printf '%s  %s\n' "${sum[$path]}" "$path"; done | LC_ALL=C sort -k 2
    for path in "${!kept[@]}"; do printf '#kept\t%s\t%s\n' "$path" "${kept[$path]}"; done | LC_ALL=C sort
    for path in "${!made[@]}"; do printf '#made\t%s\n' "$path"; done | LC_ALL=C sort
  } >"$receipt.new"
  mv -fT "$receipt.new" "$receipt"
}

# make_folder creates a folder and its parents, and adds each created folder to the receipt. Owner and mode of existing folders stay.
make_folder() {
  [ ! -d "$1" ] || return 0
  make_folder "$(dirname "$1")"
  mkdir -m 0755 "$1"
  [ "$1" = "$destdir" ] || made[${1#"$destdir"}]=1
}
