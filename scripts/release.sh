#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# release.sh OUT ARCH...: makes OUT/podlace-VERSION-linux-ARCH.tar.gz and its .sha256 for each architecture, the same bytes for the same
# commit, Go and module versions. The environment has VERSION, LDFLAGS, EPOCH (the time of all files), CNI_PLUGINS and TOOLS, SBOM (the
# command cyclonedx-gomod).
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
# install.sh installs Podlace, install.sh uninstall removes it. DESTDIR, PREFIX, CNI_BIN_DIR and DRYRUN=1 are those of make install.
set -eu
cd "\$(dirname "\$0")"
export DESTDIR=\${DESTDIR:-} PREFIX=\${PREFIX:-/usr/local} CNI_BIN_DIR=\${CNI_BIN_DIR:-/opt/cni/bin}
export RECEIPT=\$DESTDIR\$PREFIX/share/podlace/receipt
[ "\${1:-}" != uninstall ] || exec scripts/uninstall.sh
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
    CGO_ENABLED=0 GOOS=linux GOARCH=$arch go build -trimpath -buildvcs=false -ldflags "$LDFLAGS" -o "$dir/bin/$p" "./plugins/$p"
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
  (cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
  echo "made $out/$name.tar.gz"
}

scripts/licenses.sh >"$stage/licenses"
for arch in "$@"; do build "$arch"; done
