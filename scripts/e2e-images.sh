#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# e2e-images.sh CACHE: prints the folder with the images of Kubernetes' e2e tests, as files for `ctr images import`. If the images are
# missing, it builds them from programs of scripts/programs.sh and from Debian packages. It unpacks the packages in the cache and installs
# nothing. The images have the names and tags in the source of Kubernetes.
set -euo pipefail
cache=$(realpath -m "${1:?usage: e2e-images.sh CACHE}")
here=$(cd "$(dirname "$0")" && pwd)
# scripts/node.sh's sandboxes use podlace.test/busybox:1, here with the content of Kubernetes' pause image. One image serves agnhost and all
# images with a shell: curl, nc, dig, ss and conntrack with their dependencies.
packages="busybox-static dash curl wget netcat-openbsd iproute2 bind9-dnsutils conntrack libc-bin"
programs=$("$here/programs.sh" "$cache/programs" e2e agnhost regression-issue-74839 pause)
for tool in apt-get dpkg-deb; do
  command -v $tool >/dev/null || { echo "$0: $tool is missing; the images are made of Debian packages" >&2; exit 1; }
done

# The dependencies of the packages, with versions. Only the installation needs debconf and dpkg.
depends=$(apt-cache depends --recurse --no-{recommends,suggests,conflicts,breaks,replaces,enhances} $packages |
  grep '^[a-z]' | grep -vE '^(cdebconf|debconf|debianutils|dpkg|install-info|tar|gcc-12-base|libdebian-installer4|libnewt.*|libslang2|libtextwrap1|libcap2-bin)$' | sort -u)
versions=$(apt-cache show --no-all-versions $depends | awk '/^Package:/ {p = $2} /^Version:/ {print p "=" $2}' | sort -u)
key=$( (cat "$0" "$here"/image/*; echo "$programs $versions") | sha256sum | cut -c 1-12)
to=$cache/images/e2e-$key
mkdir -p "$cache/images"
exec 9>"$cache/images/.lock"
flock 9
if [ ! -e "$to" ]; then
  echo "making the images of the e2e tests in $to, once: about a minute" >&2
  start=$SECONDS
  new=$cache/images/.new # this process has the lock, so the files here are from an interrupted build
  rm -rf "$new"
  mkdir -p "$new"/{packages,root,out}
  # shellcheck disable=SC2086
  (cd "$new/packages" && apt-get download -qq $versions 2>/dev/null)
  for deb in "$new"/packages/*.deb; do dpkg-deb -x "$deb" "$new/root"; done
  rm -rf "$new"/root/{etc,var,usr/{include,lib/systemd,share,sbin/update-*}}
  mkdir -p "$new"/root/etc
  printf 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n' >"$new/root/etc/passwd"
  printf 'root:x:0:\n' >"$new/root/etc/group"
  echo 'hosts: files dns' >"$new/root/etc/nsswitch.conf"
  ln -sf dash "$new/root/bin/sh" # busybox's shell would run its built-in nc and wget
  ln -sf nc.openbsd "$new/root/bin/nc"
  for applet in $("$new/root/bin/busybox" --list); do
    if ! find "$new"/root/{bin,sbin,usr/bin,usr/sbin} -name "$applet" | grep -q .; then ln -s busybox "$new/root/bin/$applet"; fi
  done
  go build -C "$here/image" -o "$new/image" .
  source=$(cd "$here/../integration/e2e/programs/kubernetes" && go mod download k8s.io/kubernetes && go list -m -f '{{.Dir}}' k8s.io/kubernetes)
  manifest=$source/test/utils/image/manifest.go
  # name ID prints the image name for an ID of the tests.
  name() {
    local registry image tag
    read -r registry image tag < <(sed -nE "s/.*configs\[$1\] = Config\{list\.(\w+), \"([^\"]+)\", \"([^\"]+)\"\}.*/\1 \2 \3/p" "$manifest")
    registry=$(sed -nE "s/^\s+$registry: +\"([^\"]+)\",/\1/p" "$manifest")
    [ -n "$tag" ] && [ -n "$registry" ] || { echo "$0: no image $1 in $manifest" >&2; exit 1; }
    echo "$registry/$image:$tag"
  }
  "$new/image" pack -name "$(name Pause)" -name podlace.test/busybox:1 -out "$new/out/pause.tar" -entrypoint /pause "/pause=$programs/pause"
  "$new/image" pack -name "$(name RegressionIssue74839)" -out "$new/out/regression-issue-74839.tar" \
    -entrypoint /regression-issue-74839 "/regression-issue-74839=$programs/regression-issue-74839"
  "$new/image" pack -name "$(name Agnhost)" -name "$(name BusyBox)" -name "$(name DistrolessIptables)" -name "$(name GlibcDnsTesting)" \
    -name "$(name Nginx)" -out "$new/out/agnhost.tar" -entrypoint /agnhost -cmd pause \
    "/=$new/root" "/agnhost=$programs/agnhost" link:/agnhost-2=agnhost dir:/uploads=0755 dir:/tmp=1777 dir:/root=0700 \
    "/localhost.crt=$source/test/images/agnhost/porter/localhost.crt" "/localhost.key=$source/test/images/agnhost/porter/localhost.key"
  mv "$new/out" "$to"
  rm -rf "$new"
  echo "made in $((SECONDS - start)) s" >&2
fi
echo "$to"
