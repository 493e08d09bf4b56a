#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# uninstall.sh: removes the files of the receipt RECEIPT, restores the kept files of other projects, and removes empty folders that the
# installation created. A file that changed since the installation stays, with its line in the receipt.
# DRYRUN=1 only prints the plan; DESTDIR is the prefix of each path.
set -eu
here=$(dirname "$0")
# shellcheck source=scripts/receipt.sh
. "$here/receipt.sh"
[ -e "$receipt" ] || fail "$receipt is missing: nothing was installed with these folders; give DESTDIR and PREFIX of the installation"
read_receipt
left=0

attached=$(find "$destdir/run/podlace" -path '*/podlace/[!.]*/*' \( -name 'bridge-*' -o -name 'sriov-*' \) 2>/dev/null | wc -l)
if [ "$attached" -gt 0 ]; then
  echo "${0##*/}: warning: attachments of Podlace on this node: $attached. Without plugins the runtime cannot delete these pods:" \
    "see 'Removing' in docs/INSTALL.md" >&2
fi

# Without podlace-pod, every DEL of a configuration that names it fails. libcni keeps the configuration of each ADD as base64.
named=$(grep -rlsF --include='*.conf' --include='*.conflist' --include='*.json' '"podlace-pod"' "$destdir"/etc/cni \
  "$destdir"/var/lib/rancher/k3s/agent/etc/cni || :)
for file in "$destdir"/var/lib/cni/results/*; do
  sed -n 's/.*"config": *"\([^"]*\)".*/\1/p' "$file" 2>/dev/null | base64 -d 2>/dev/null | grep -qF '"podlace-pod"' || continue
  named+=${named:+$'\n'}$file
done
if [ -n "$named" ] && [[ " ${!sum[*]} " == */podlace-pod\ * ]]; then
  why="podlace-pod is named in ${named//$'\n'/, }, so nothing is removed. Replace it in a conflist, or delete the conflist if it has no \
pods. Delete the pod of a file below /var/lib/cni/results, or the file if there is no such pod."
  [ -n "${DRYRUN:-}" ] || fail "$why"
  echo "${0##*/}: warning: $why" >&2
fi

# change DONE PLAN WHAT COMMAND...: runs the command and prints what it has done, or with DRYRUN=1 what it would do.
change() {
  if [ -n "${DRYRUN:-}" ]; then
    echo "plan: $2 $3"
    return
  fi
  "${@:4}"
  echo "$1 $3"
}

remove() {
  local path=$1 file=$destdir$1 copy=${kept[$1]:+$destdir${kept[$1]}}
  if exists "$file" && { [ -L "$file" ] || [ "$(hash "$file")" != "${sum[$path]}" ]; }; then
    change left leave "$file: it changed since the installation" :
    left=$((left + 1))
    return
  fi
  if [ -n "$copy" ] && exists "$copy"; then
    change restored restore "$file from $copy" mv -fT "$copy" "$file"
  elif exists "$file"; then
    change removed remove "$file" rm -f "$file"
  fi
  unset "sum[$path]" "kept[$path]"
}

mapfile -t paths < <(printf '%s\n' "${!sum[@]}" | LC_ALL=C sort)
for path in "${paths[@]}"; do remove "$path"; done
[ -z "${DRYRUN:-}" ] || exit 0
if [ "$left" -gt 0 ]; then
  write_receipt
  fail "$left files are left; remove them by hand, then $receipt"
fi
rm -f "$receipt"
printf '%s\n' "${!made[@]}" | LC_ALL=C sort -r | while IFS= read -r path; do
  [ -z "$path" ] || rmdir --ignore-fail-on-non-empty "$destdir$path" 2>/dev/null || :
done
