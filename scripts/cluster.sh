#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# cluster.sh runs a Kubernetes cluster on one machine, in separate namespaces. The control plane and two nodes share a link, and a third node
# is behind a router. Each machine of the cluster is a process of node.sh. When the parent process of cluster.sh ends, the cluster ends, and
# nothing remains on the machine. Clusters may run in parallel.
#
#   cluster.sh check             exit 0 if a cluster can run on this machine, else print the reason; needs no programs in KUBERNETES
#   cluster.sh run DIR           start it, print addresses and "ready", stay in the foreground; the end of standard input, TERM or
#                                Ctrl-C ends the cluster
#   cluster.sh up DIR            start it in the background
#   cluster.sh down DIR          end the cluster that `up` started
#   cluster.sh exec DIR WHERE CMD..   run a command in plane, node1, node2, node3, outside or router; kubectl is in plane's PATH
#   cluster.sh reboot DIR NODE   end a node as a power failure does, and restart it: its memory and network are empty, its disk stays
#   cluster.sh byhand DIR        make the nodes Ready without an agent, for comparison: plugins, node.json, routes and the conflist
#
# DIR is the absolute path of a folder of the caller. cluster.sh reads images/*.tar in this folder for all nodes. It writes a folder with
# logs for each machine, and new keys and tokens for each cluster.
#
# KUBERNETES   folder of Kubernetes' programs and etcd (built by scripts/programs.sh), needed by run and exec
# CONTAINERD   containerd of the nodes (default: containerd in PATH); CRIO has the meaning as in node.sh, but only for node3
# FAMILIES     "4 6" (default), "6 4", "4" or "6"
# PROXY        mode of kube-proxy: nftables (default), iptables, or none for a cluster without kube-proxy
# BRIDGE_NF    net.bridge.bridge-nf-call-iptables of the nodes: 1 (default) or 0
# NODES        default "node1 node2 node3"
# APISERVER, CONTROLLERS, KUBELETS  further flags of kube-apiserver, kube-controller-manager and the kubelets
# GATES        feature gates of these three programs and of kube-scheduler, such as DRADeviceTaints=false
# PODLACE_BIN  folder of the plugins, for byhand (default bin)
#
# Addresses: 192.0.2.0/24 and 2001:db8::/64 hold the router .1, the plane .10, node1 .11, node2 .12 and outside .100, a client outside the
# cluster; 198.51.100.0/24 and 2001:db8:1::/64 hold the router .1 and node3 .13. Pods are in 10.244.0.0/16 and fd00:10:244::/56.
set -euo pipefail

die() {
  echo "cluster.sh: $*" >&2
  exit 1
}

# address MACHINE FAMILY prints the machine's address.
address() {
  local host
  case $1 in
  router*) host=1 ;;
  plane) host=10 ;;
  node[123]) host=1${1#node} ;;
  outside) host=100 ;;
  esac
  case $1$2 in
  node34 | routerb4) echo "198.51.100.$host" ;;
  node36 | routerb6) echo "2001:db8:1::$host" ;;
  *4) echo "192.0.2.$host" ;;
  *6) echo "2001:db8::$host" ;;
  esac
}

# each FUNCTION [ARG] prints the function's results for all families, separated by commas.
each() {
  local all=() f
  for f in $families; do all+=("$("$@" "$f")"); done
  (
    IFS=,
    echo "${all[*]}"
  )
}

pods() { case $1 in 4) echo 10.244.0.0/16 ;; 6) echo fd00:10:244::/56 ;; esac }
services() { case $1 in 4) echo 10.96.0.0/16 ;; 6) echo fd00:10:96::/112 ;; esac }
service() { case $1 in 4) echo 10.96.0.1 ;; 6) echo fd00:10:96::1 ;; esac }
subject() { echo "IP:$(address plane "$1"),IP:$(service "$1")"; }
api() { case $families in 4*) echo "https://$(address plane 4):6443" ;; *) echo "https://[$(address plane 6)]:6443" ;; esac }

check() {
  [ "$(id -u)" = 0 ] || die "needs root: nodes mount and make cgroups"
  local program missing=
  for program in openssl ip sysctl runc busybox ${CRIO:+conmon skopeo}; do command -v "$program" >/dev/null || missing="$missing $program"; done
  [ -z "$missing" ] || die "missing programs:$missing
install them; on Debian: apt-get install openssl iproute2 procps runc busybox-static ${CRIO:+conmon skopeo}"
  case $families in 4 | 6 | "4 6" | "6 4") ;; *) die "FAMILIES is \"$families\" and must be 4, 6, \"4 6\" or \"6 4\"" ;; esac
  case $proxy in nftables | iptables | none) ;; *) die "PROXY is $proxy and must be nftables, iptables or none" ;; esac
  case $bridge_nf in 0 | 1) ;; *) die "BRIDGE_NF is $bridge_nf and must be 0 or 1" ;; esac
  RUNTIME=none "$node" check
}

# link MACHINE BRIDGE ROUTER gives a machine its network namespace, addresses and default routes.
link() {
  local f
  ip netns add "$1"
  ip link add "$1" type veth peer name eth0 netns "$1"
  ip link set "$1" master "$2" up
  ip -n "$1" link set lo up
  ip -n "$1" link set eth0 up
  for f in $families; do
    give "$1" eth0 "$1" "$f"
    [ -z "$3" ] || ip -n "$1" "-$f" route add default via "$(address "$3" "$f")"
  done
}

# give NETNS DEVICE MACHINE FAMILY gives the device the machine's address.
give() {
  local length=(/24)
  [ "$4" = 4 ] || length=(/64 nodad)
  ip -n "$1" address add "$(address "$3" "$4")${length[0]}" dev "$2" "${length[@]:1}"
}

# links creates the two subnets, the router between them and the client outside.
links() {
  local n f
  ip link add lan type bridge
  ip link add far type bridge
  ip link set lan up
  ip link set far up
  sysctl -qw net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0 2>/dev/null || :
  link router lan ""
  ip link add routerb type veth peer name eth1 netns router
  ip link set routerb master far up
  ip -n router link set eth1 up
  for f in $families; do give router eth1 routerb "$f"; done
  inside router sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
  for n in plane outside $nodes; do member_link "$n"; done
}

# member_link MACHINE connects the machine to its subnet.
member_link() {
  case $1 in
  node3) link "$1" far routerb ;;
  *) link "$1" lan router ;;
  esac
  inside "$1" sysctl -qw "net.bridge.bridge-nf-call-iptables=$bridge_nf" "net.bridge.bridge-nf-call-ip6tables=$bridge_nf"
}

# inside MACHINE CMD.. runs a command in the machine's network namespace.
inside() { nsenter "--net=/run/netns/$1" "${@:2}"; }

# crio NODE prints the folder of CRI-O if that is the node's runtime.
crio() { [ "$1" != node3 ] || echo "${CRIO:-}"; }
runtime() { [ -z "$(crio "$1")" ] && echo containerd || echo crio; }

# start MACHINE starts its node.sh.
start() {
  local none=
  [ "$1" != plane ] || none=none
  CRIO=$(crio "$1") RUNTIME=$none NODE_NAME=$1 CNI_CONF=/etc/cni/net.d CNI_BIN=/opt/cni/bin \
    setpriv --pdeathsig TERM nsenter "--net=/run/netns/$1" "$node" run "$dir/$1" <&0 >"$dir/$1/out" 2>&1 &
  units[$1]=$!
}

# lan keeps the network namespaces open. The cluster ends with it.
lan() {
  local n
  echo $$ >"$dir/pid"
  trap finish EXIT
  trap 'exit 0' TERM INT HUP
  mount -t tmpfs -o mode=755 tmpfs /run
  links
  exec 5<&0
  # shellcheck disable=SC2016
  setpriv --pdeathsig KILL sh -c 'while read -r _; do :; done; kill -TERM $PPID' <&5 &
  for n in $nodes; do mkdir "$dir/$n/disk" && mount -t tmpfs -o mode=755 tmpfs "$dir/$n/disk"; done
  for n in plane $nodes; do start "$n" <&5; done
  await 300 "the API server" kubectl get --raw /readyz
  for n in $nodes; do
    await 300 "podCIDRs of $n" cidrs_of "$n"
    plane_route "$n"
  done
  trap boot USR1
  summary
  echo ready
  until wait; do :; done # a signal interrupts it
}

# boot ends the machine that the file names, and starts it again.
boot() {
  local n
  n=$(cat "$dir/reboot")
  kill -KILL "$(cat "$dir/$n/pid")"
  wait "${units[$n]}" || :
  ip link delete "$n"
  ip netns delete "$n"
  member_link "$n"
  start "$n" <&5
  rm "$dir/reboot"
}

# reboot NODE waits until the node restarts.
reboot() {
  local pid
  pid=$(cat "$dir/pid" 2>/dev/null) || die "no cluster runs in $dir"
  case " $nodes " in *" $1 "*) ;; *) die "no node $1: there are $nodes" ;; esac
  echo "$1" >"$dir/reboot"
  kill -USR1 "$pid"
  for _ in $(seq 300); do
    [ -e "$dir/reboot" ] || return 0
    sleep 0.1
  done
  die "$1 did not reboot"
}

# plane_route NODE adds the API server's route to the node's pods, which other machines cannot reach through the router.
plane_route() {
  local c f
  for c in $(cidrs_of "$1"); do
    f=$(family "$c")
    if [ "$1" = node3 ]; then
      inside plane ip route add "$c" via "$(address router "$f")"
      inside router ip "-$f" rule add from "$(address plane "$f")" to "$c" lookup 100
      inside router ip route add "$c" via "$(address node3 "$f")" table 100
    else
      inside plane ip route add "$c" via "$(address "$1" "$f")"
    fi
  done
}

finish() {
  local u
  for u in "${units[@]}"; do kill -TERM "$u" 2>/dev/null || :; done
  for u in "${units[@]}"; do wait "$u" 2>/dev/null || :; done
  rm -f "$dir/pid"
}

# await SECONDS WHAT CMD.. waits until the command succeeds. It fails if a machine ends.
await() {
  local u end=$((SECONDS + $1))
  until "${@:3}" >/dev/null 2>&1; do
    for u in "${units[@]}"; do kill -0 "$u" 2>/dev/null || die "a machine ended: $(cat "$dir"/*/out)"; done
    [ $SECONDS -lt $end ] || die "no sign of $2 after $1 s; see $dir/*/*.log"
    sleep 0.2
  done
}

kubectl() {
  local k=("$kubernetes/kubectl" --kubeconfig "$dir/plane/admin.kubeconfig")
  if [ "$verb" = lan ]; then inside plane "${k[@]}" "$@"; else "$self" exec "$dir" plane "${k[@]}" "$@"; fi
}

summary() {
  cat <<T
plane    $(each address plane)  etcd, kube-apiserver, kube-controller-manager, kube-scheduler: $dir/plane
$(for n in $nodes; do echo "$n    $(each address "$n")  $(runtime "$n"), kubelet, kube-proxy ($proxy): $dir/$n"; done)
outside  $(each address outside)  a client that is no node
pods     $(each pods)  services $(each services)
commands in them: $self exec $dir plane|node1|node2|node3|outside|router COMMAND
T
}

# run prepares the folder and enters new network and mount namespaces.
run() {
  check
  case $dir in /run/* | /var/run/* | /sys/* | /proc/* | /var/lib/* | /var/log/* | /opt/* | /etc/*) die "$dir is hidden in nodes" ;; esac
  [ ! -e "$dir/pid" ] || [ ! -d "/proc/$(cat "$dir/pid")" ] || die "a cluster runs in $dir already"
  [ -x "$kubernetes/kube-apiserver" ] || die "KUBERNETES=$kubernetes has no kube-apiserver: scripts/programs.sh builds it"
  local n
  for n in plane $nodes; do
    rm -rf "${dir:?}/$n"
    mkdir -p "$dir/$n/services"
  done
  rm -rf "$dir/pki"
  mkdir -p "$dir/images"
  keys 2>"$dir/plane/openssl.log" || die "openssl: $(cat "$dir/plane/openssl.log")"
  plane
  for n in $nodes; do member "$n"; done
  exec unshare --mount --net --propagation private "$self" lan "$dir"
}

up() {
  mkdir -p "$dir"
  rm -f "$dir/hold"
  mkfifo "$dir/hold"
  : >"$dir/up.log"
  setsid "$self" run "$dir" <>"$dir/hold" >"$dir/up.log" 2>&1 &
  until grep -qx ready "$dir/up.log"; do
    kill -0 $! 2>/dev/null || die "$(cat "$dir/up.log")"
    sleep 0.2
  done
  cat "$dir/up.log"
}

down() {
  local pid
  pid=$(cat "$dir/pid" 2>/dev/null) || die "no cluster runs in $dir"
  kill -TERM "$pid"
  for _ in $(seq 200); do
    [ -e "$dir/pid" ] || return 0
    sleep 0.1
  done
  die "process $pid of $dir did not end"
}

enter() {
  local pid
  pid=$(cat "$dir/pid" 2>/dev/null) || die "no cluster runs in $dir"
  case $1 in
  plane) exec env "PATH=$kubernetes:$PATH" "KUBECONFIG=$dir/plane/admin.kubeconfig" "$node" exec "$dir/plane" "${@:2}" ;;
  node[123]) exec env "PATH=$kubernetes:$(dirname "${CONTAINERD:-/usr/bin/containerd}")${CRIO:+:$CRIO}:$PATH" "$node" exec "$dir/$1" "${@:2}" ;;
  outside | router) exec nsenter "--net=/proc/$pid/root/run/netns/$1" "${@:2}" ;;
  *) die "no machine $1: there are plane $nodes outside router" ;;
  esac
}

# byhand runs the steps of conf/README.md for a node without the agent.
byhand() {
  local n other c f cidrs via
  for n in $nodes; do
    cidrs=$(cidrs_of "$n")
    for c in $cidrs; do
      f=$(family "$c")
      for other in router $nodes; do
        case $n$other in
        "$n$n") continue ;;
        node3router) via=$(address node3 "$f") ;;
        node3*) via=$(address router "$f") ;;
        *node3) via=$(address routerb "$f") ;;
        *) via=$(address "$n" "$f") ;;
        esac
        "$self" exec "$dir" "$other" ip route replace "$c" via "$via"
      done
    done
    "$self" exec "$dir" "$n" sh -ec 'mkdir -p /run/podlace /opt/cni/bin /etc/cni/net.d
      printf "{\"podCIDRs\":[\"%s\"]}\n" "$1" | sed "s/ /\",\"/g" >/run/podlace/node.json
      cp --remove-destination "$2"/* /opt/cni/bin/
      cat >/etc/cni/net.d/new
      mv /etc/cni/net.d/new /etc/cni/net.d/10-podlace.conflist' sh "$cidrs" "$bin" <<<"$(conflist)"
  done
}

family() { case $1 in *:*) echo 6 ;; *) echo 4 ;; esac }
cidrs_of() { kubectl get node "$1" -o 'jsonpath={.spec.podCIDRs[*]}' | grep .; }

conflist() {
  local ranges='[{"subnet":"usePodCidr"}]' routes='{"dst":"0.0.0.0/0"}'
  case $families in
  6) routes='{"dst":"::/0"}' ;;
  *" "*) ranges="$ranges,[{\"subnet\":\"usePodCidrIPv6\"}]" routes="$routes,{\"dst\":\"::/0\"}" ;;
  esac
  cat <<J
{"cniVersion":"1.0.0","cniVersions":["1.0.0","1.1.0"],"name":"podlace","plugins":[
 {"type":"bridge","isGateway":true,"ipMasq":{"nonMasqueradeCIDRs":["$(each pods | sed 's/,/","/')"]},"hairpinMode":true,
  "ipam":{"type":"host-local","ranges":[$ranges],"routes":[$routes]}},
 {"type":"portmap","capabilities":{"portMappings":true}},
 {"type":"bandwidth","capabilities":{"bandwidth":true}}]}
J
}

self=$(realpath "$0") node=$(dirname "$(realpath "$0")")/node.sh
# shellcheck source=scripts/cluster-kubernetes.sh
. "$(dirname "$self")/cluster-kubernetes.sh"
verb=${1-} dir=${2-}
declare -A units=()
families=${FAMILIES:-4 6} proxy=${PROXY:-nftables} bridge_nf=${BRIDGE_NF:-1} nodes=${NODES:-node1 node2 node3}
apiserver=${APISERVER:-} controllers=${CONTROLLERS:-} kubelets=${KUBELETS:-} gates=${GATES:+--feature-gates=$GATES}
kubernetes=${KUBERNETES:-} bin=$(realpath -m "${PODLACE_BIN:-$(dirname "$self")/../bin}")
case $verb$dir in
check | run/* | up/* | down/* | lan/* | byhand/*) "$verb" ;;
exec/*) enter "${@:3}" ;;
reboot/*) reboot "${3-}" ;;
*) sed -n '/^#   cluster.sh/s/^# *//p' "$self" >&2 && exit 1 ;;
esac
