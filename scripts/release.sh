#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# release.sh OUT ARCH...: builds an archive (.tar.gz), a deb and an rpm for each architecture, and the .sha256 of each file. The same
# commit, Go and module versions give identical bytes. The environment has VERSION, LDFLAGS, EPOCH (the time of all files), CNI_PLUGINS,
# TOOLS, and the commands SBOM (cyclonedx-gomod) and NFPM.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

# write_installer writes the archive's installer: the scripts of `make install` and `make uninstall` with the archive's folders.
write_installer() {
  cat <<END
#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# install.sh installs Podlace, and install.sh uninstall removes Podlace. DESTDIR, PREFIX, CNI_BIN_DIR and DRYRUN=1 have the same meaning as for
# make install.
set -eu
cd "\$(dirname "\$0")"
export DESTDIR=\${DESTDIR:-} PREFIX=\${PREFIX:-/usr/local} CNI_BIN_DIR=\${CNI_BIN_DIR:-/opt/cni/bin}
export RECEIPT=\$DESTDIR\$PREFIX/share/podlace/receipt
case \${*:-install} in
  install) ;;
  uninstall) exec scripts/uninstall.sh ;;
  *) echo "install.sh: unknown arguments: \$*: want none, or uninstall; DRYRUN=1 prints the plan" >&2; exit 2 ;;
esac
exec scripts/install.sh bin "\$DESTDIR\$CNI_BIN_DIR" $CNI_PLUGINS -- bin "\$DESTDIR\$PREFIX/bin" $TOOLS
END
}

write_sboms() {
  local name
  mkdir "$1/sbom"
  for name in $CNI_PLUGINS $TOOLS; do
    $SBOM bin -json -noserial -notimestamp -std -version "$VERSION" -output "$1/sbom/$name.cdx.json" "$1/bin/$name" 2>"$stage/sbom.log" || {
      cat "$stage/sbom.log" >&2
      exit 1
    }
  done
}

build() {
  local arch=$1 name=podlace-$VERSION-linux-$1 p
  local dir=$stage/$name
  mkdir -p "$dir/bin" "$dir/conf" "$dir/scripts"
  for p in $CNI_PLUGINS $TOOLS; do
    CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "$LDFLAGS" -o "$dir/bin/$p" "./plugins/$p"
  done
  cp scripts/install.sh scripts/uninstall.sh scripts/receipt.sh "$dir/scripts/"
  cp conf/*.conflist conf/*.service conf/*.timer conf/sriov-config.json "$dir/conf/"
  cp LICENSE CHANGELOG.md "$dir/"
  cp "$stage/licenses" "$dir/THIRD-PARTY-LICENSES"
  write_installer >"$dir/install.sh"
  chmod 0755 "$dir/install.sh"
  write_sboms "$dir"
  chmod -R u=rwX,go=rX "$dir"
  tar -C "$stage" --sort=name --mtime="@$EPOCH" --owner=0 --group=0 --numeric-owner --format=gnu -cf - "$name" | gzip -9n >"$out/$name.tar.gz"
  add_checksum "$name.tar.gz"
  package "$dir" "$arch"
}

add_checksum() {
  (cd "$out" && sha256sum "$1" >"$1.sha256")
  echo "made $out/$1"
}

# package makes a deb and an rpm from the folder of the archive. A package installs its programs below /usr, so the units need paths below /usr.
package() {
  local root=$stage/package-$2 format file
  mkdir -p "$root/plugins" "$root/tools" "$root/units"
  cp -r "$1/conf" "$1/sbom" "$1/LICENSE" "$1/THIRD-PARTY-LICENSES" "$stage/man" "$stage/completion" "$root/"
  rm "$root"/conf/*.service "$root"/conf/*.timer
  (cd "$1/bin" && cp $CNI_PLUGINS "$root/plugins/" && cp $TOOLS "$root/tools/")
  for file in "$1"/conf/*.service "$1"/conf/*.timer; do
    sed -e 's|/usr/local/bin/|/usr/bin/|g' -e 's|/usr/local/lib/podlace/plugins|/usr/libexec/podlace/cni|g' "$file" >"$root/units/$(basename "$file")"
  done
  for format in deb rpm; do
    file=podlace-$VERSION-linux-$2.$format
    STAGE=$root ARCH=$2 PACKAGE_VERSION=$(package_version) SOURCE_DATE_EPOCH=$EPOCH \
      $NFPM package -f scripts/package/nfpm.yaml -p "$format" -t "$out/$file"
    add_checksum "$file"
  done
}

# package_version prints the version in the form of packages: it begins with a digit and has no hyphen. A commit without a tag sorts before
# any version, and a pre-release sorts before its release.
package_version() {
  local v=${VERSION#v}
  case $VERSION in v[0-9]*) ;; *) v=0~$VERSION ;; esac
  case $v in *-alpha* | *-beta* | *-rc*) v=${v/-/"~"} ;; esac
  echo "${v//-/.}"
}

# The documents are the same for all architectures.
mkdir "$stage/man" "$stage/completion"
go run -C scripts/package . "$stage/man" "$EPOCH"
for shell in bash zsh fish; do go run ./plugins/podlace completion "$shell" >"$stage/completion/podlace.$shell"; done
scripts/licenses.sh >"$stage/licenses"
for arch in "$@"; do build "$arch"; done
