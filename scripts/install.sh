#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install.sh FROM FOLDER NAME... [-- FROM FOLDER NAME...]: prints a plan, then copies files into folders that may be in use. Each file is
# written to a temporary file in the same folder and renamed, so a runtime starts the complete old or new program. Another project's file
# is kept as NAME.before-podlace. DRYRUN=1 stops after the plan. RECEIPT=FILE lists the installed files for uninstall.sh. DESTDIR is the
# prefix of the paths that the receipt omits.
set -eu
umask 022
here=$(dirname "$0")
# shellcheck source=scripts/receipt.sh
. "$here/receipt.sh"
sources=() targets=() copies=() same=()

while [ $# -gt 0 ]; do
  from=$1 to=$2
  shift 2
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    sources+=("$from/$1") targets+=("$to/$1")
    shift
  done
  [ $# -eq 0 ] || shift
done

# Every binary of Podlace has the path of its main package in Go's build information.
ours() {
  [ "${sum[${1#"$destdir"}]:-}" = "$(hash "$1")" ] || grep -qaF $'path\tgithub.com/podlace/podlace/plugins/' "$1" 2>/dev/null
}

# copy_of prints the name of an existing copy with the same content, or the first free name for a copy. It never reuses another name.
copy_of() {
  local copy=$1.before-podlace n=1
  while exists "$copy" && ! cmp -s "$1" "$copy"; do
    n=$((n + 1))
    copy=$1.before-podlace-$n
  done
  echo "$copy"
}

plan() {
  local i target
  for i in "${!targets[@]}"; do
    target=${targets[$i]} copies[i]=
    [ -f "${sources[$i]}" ] || fail "${sources[$i]} is missing: run 'make build' first"
    [ ! -d "$target" ] || [ -L "$target" ] || fail "$target is a folder"
    if ! exists "$target"; then
      echo "plan: $target: new"
    elif cmp -s "${sources[$i]}" "$target" && [ ! -L "$target" ]; then
      echo "plan: $target: unchanged"
      same[i]=1
    elif ours "$target"; then
      echo "plan: $target: replaces another build of Podlace"
    else
      copies[i]=$(copy_of "$target")
      echo "plan: $target: replaces a file of another project, kept as ${copies[$i]}"
    fi
  done
}

# note_all adds the new files to the receipt before the first change. If the installation is interrupted before it replaces a file, the hash
# differs from the receipt, so uninstall.sh keeps the file.
note_all() {
  local i path
  for i in "${!targets[@]}"; do
    path=${targets[$i]#"$destdir"}
    sum[$path]=$(hash "${sources[$i]}")
    [ -z "${copies[$i]}" ] || kept[$path]=${copies[$i]#"$destdir"}
    make_folder "$(dirname "${targets[$i]}")"
  done
  write_receipt
}

# The copy of a symbolic link is a symbolic link.
keep_all() {
  local i
  for i in "${!targets[@]}"; do
    [ -n "${copies[$i]}" ] && ! exists "${copies[$i]}" || continue
    ln -P "${targets[$i]}" "${copies[$i]}" || fail "cannot keep ${targets[$i]} as ${copies[$i]}"
    echo "kept ${targets[$i]} as ${copies[$i]}"
  done
}

install_all() {
  local i mode
  for i in "${!targets[@]}"; do
    mode=0644
    [ ! -x "${sources[$i]}" ] || mode=0755
    temp=$(mktemp "$(dirname "${targets[$i]}")/.podlace.XXXXXX")
    trap 'rm -f "$temp"' EXIT
    cp "${sources[$i]}" "$temp"
    chmod "$mode" "$temp"
    mv -fT "$temp" "${targets[$i]}"
    trap - EXIT
    [ -n "${same[i]:-}" ] || echo "installed ${targets[$i]}"
  done
}

read_receipt
plan
[ -z "${DRYRUN:-}" ] || exit 0
note_all
keep_all
install_all
