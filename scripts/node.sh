#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# node.sh starts a throw-away Kubernetes-like node: containerd or CRI-O in mount, network,
# pid and cgroup namespaces of its own, with its own /run, /var/lib and /sys.
# The end of node.sh ends everything in the node, and nothing remains on the machine.
#
#   node.sh check               exit 0 if a node can run on this machine, else print the reason
#   node.sh run DIR             start the node, print "ready", stay in the foreground;
#                               the end of standard input, TERM or Ctrl-C ends the node
#   node.sh exec DIR CMD ARG..  run a command inside the node
#
# DIR is a folder of the caller. node.sh reads net.d/*.conflist and images/*.tar in this folder
# (the image of the sandboxes is podlace.test/busybox:1), and writes containerd.log or crio.log,
# and pid.
#
# CNI_BIN      folder of the CNI plugins, an absolute path (default /opt/cni/bin)
# CONTAINERD   containerd to run in place of containerd in PATH; node.sh looks for ctr
#              and containerd-shim-runc-v2 in the same folder first
# CRIO         folder of crio and pinns (scripts/crio.sh makes one): the node runs CRI-O
# RUNTIME      none: a machine with services and without pods
# RUNC         runc to run in place of runc in PATH
#
# CNI_CONF     folder of the configurations (default DIR/net.d)
# NODE_NAME    name of a node of a cluster: its hostname. The node uses the caller's network,
#              and its /etc/cni and /opt/cni start empty.
#              DIR/disk, if it exists, holds the files that survive a reboot
#
# After the import of the images, the node runs each program in DIR/services, and restarts
# the program when it ends. The output of a program goes to DIR/NAME.log.
#
# The runtime is restarted when it ends, unless /run/node/stay-down exists.
#
# Without a NODE_NAME the node's address is 192.0.2.1 and 2001:db8::1 on eth0; at the other end of
# eth0 is the network namespace "outside" with 192.0.2.2 and 2001:db8::2.
set -eu

die() {
	echo "node.sh: $*" >&2
	exit 1
}

# hierarchies lists the mounted cgroup hierarchies as "type folder".
hierarchies() {
	while read -r _ at type _; do
		case $type in cgroup | cgroup2) echo "$type $at" ;; esac
	done </proc/self/mounts
}

# remove NAME waits until the processes of the cgroup have ended, and removes it with all below it.
remove() {
	hierarchies | while read -r _ at; do
		for _ in $(seq "${2:-100}"); do
			[ -d "$at/$1" ] || break
			find "$at/$1" -depth -type d -exec rmdir {} + 2>/dev/null && break
			sleep 0.1
		done
		[ ! -d "$at/$1" ] || echo "node.sh: cannot remove the cgroup $at/$1" >&2
	done
}

# sweep removes the cgroups of nodes that were killed before their own cleanup.
sweep() {
	hierarchies | while read -r _ at; do
		find "$at" -maxdepth 1 -name 'podlace-node-*'
	done | while read -r stale; do
		[ -d "/proc/${stale##*-}" ] || remove "${stale##*/}" 1
	done
}

check() {
	[ "$(id -u)" = 0 ] || die "needs root: $runtime mounts and makes cgroups"
	missing=
	for program in $("${runtime}_programs") ip unshare nsenter setpriv; do
		command -v "$program" >/dev/null || missing="$missing $program"
	done
	[ -z "$missing" ] || die "missing:$missing"
	unshare --mount --net --pid --cgroup --fork true || die "cannot make namespaces"
	[ -n "$(hierarchies)" ] || die "no cgroup hierarchy is mounted"
	for at in $(hierarchies | cut -d' ' -f2); do
		mkdir "$at/podlace-node-$$" && rmdir "$at/podlace-node-$$" || die "cannot make a cgroup in $at"
	done
}

run() {
	check
	case $dir in
	/run/* | /var/run/* | /sys/* | /proc/*) die "$dir is hidden inside the node; use another folder" ;;
	esac
	sweep
	group=podlace-node-$$
	# The node's first process ends at the end of input. If this script is killed, so are unshare(1) and that process. The kernel then ends all
	# processes in the node's pid namespace.
	exec 3<&0
	setpriv --pdeathsig KILL "$0" join "$dir" "$group" <&3 3<&- &
	node=$!
	echo "$node" >"$dir/pid"
	trap finish EXIT
	trap 'exit 0' TERM INT HUP
	wait "$node" || die "the node failed; see $dir/$runtime.log"
}

finish() {
	kill -KILL "$node" 2>/dev/null || :
	wait "$node" 2>/dev/null || :
	remove "$group" 100
	rm -f "$dir/pid"
}

# join moves this process into a new cgroup of every hierarchy.
join() {
	for at in $(hierarchies | cut -d' ' -f2); do
		mkdir "$at/$group"
		for f in cpuset.cpus cpuset.mems; do # these files are empty in a new v1 group, and no process can join a group with empty files
			if [ -e "$at/$f" ]; then cat "$at/$f" >"$at/$group/$f"; fi
		done
		echo $$ >"$at/$group/cgroup.procs"
	done
	exec unshare --cgroup "$0" split "$dir" "$group"
}

# split runs in the new cgroup namespace. A v2 group with processes cannot enable controllers for its children, so split moves the node's
# processes into a leaf.
split() {
	for at in $(hierarchies | sed -n 's/^cgroup2 //p'); do
		mkdir "$at/$group/init"
		echo $$ >"$at/$group/init/cgroup.procs"
		for c in $(cat "$at/$group/cgroup.controllers"); do
			echo "+$c" >"$at/$group/cgroup.subtree_control"
		done
	done
	net=--net
	[ -z "$name" ] || net=
	exec unshare --mount $net --pid --uts --fork --kill-child --propagation private "$0" init "$dir" "$group"
}

# init is the first process of the node.
init() {
	exec 3<&0 4>>"$dir/$runtime.log" # open the log now, because later the node sees a copy of /var/lib
	trap 'exit 0' TERM INT HUP
	(
		while read -r _; do :; done
		kill -TERM 1
	) <&3 &
	mounts
	if [ -n "$name" ]; then hostname "$name"; else network; fi
	[ "$runtime" = none ] || runtime
	for service in "$dir"/services/*; do
		[ ! -x "$service" ] || supervise "${service##*/}" "$service" >>"$dir/${service##*/}.log" 2>&1 3<&- 4>&- &
	done
	echo ready
	wait
}

# runtime starts the runtime and gives it the images.
runtime() {
	"${runtime}_configure"
	supervise "$runtime" "${runtime}_start" >&4 2>&1 3<&- 4>&- &
	for _ in $(seq 200); do
		[ -S "/run/$runtime/$runtime.sock" ] && break
		sleep 0.05
	done
	"${runtime}_images"
}

# mounts replaces the folders that the machine and the node must not share.
mounts() {
	mount -t proc proc /proc
	mkdir -p "$dir/cgroup"
	mount -t tmpfs tmpfs "$dir/cgroup"
	for at in $(hierarchies | cut -d' ' -f2); do
		to=$dir/cgroup${at#/sys/fs/cgroup}
		mkdir -p "$to"
		mount --bind "$at/$group" "$to"
	done
	mount -t sysfs sysfs /sys
	mount --move "$dir/cgroup" /sys/fs/cgroup
	umount "$dir/cgroup" 2>/dev/null || : # if v2 is the only hierarchy, it was bound over the tmpfs
	rmdir "$dir/cgroup"
	umount -R -l /run/netns 2>/dev/null || : # these are the machine's mounts; containerd would find them below the node's mount
	mount -t tmpfs -o mode=755 tmpfs /run
	mkdir -p /run/lock /run/node/tmp
	for d in /etc /opt /var/lib /var/log; do
		own=/run/node/own$d
		mkdir -p "$own/upper" "$own/work"
		mount -t overlay -o "lowerdir=$d,upperdir=$own/upper,workdir=$own/work" overlay "$d"
	done
	for d in cni containerd containers crio kubelet; do # the node must not see the state of the machine's runtime
		own "/var/lib/$d"
	done
	# systemd shares all mounts, and containers with mountPropagation need that. Otherwise ip-netns(8) would mount its folder itself.
	mkdir /run/netns
	mount --bind /run/netns /run/netns
	mount --make-shared /run/netns
	mount --make-shared /var/lib/kubelet
	[ -z "$name" ] || for d in /etc/cni /opt/cni; do own "$d"; done
	sysctls
}

# own FOLDER gives the node a private folder, on the node's disk if the node has a disk.
own() {
	mkdir -p "$1"
	if [ -d "$dir/disk" ]; then
		mkdir -p "$dir/disk$1"
		mount --bind "$dir/disk$1" "$1"
	else
		mount -t tmpfs -o mode=755 tmpfs "$1"
	fi
}

# sysctls mounts files over the parameters that a kubelet sets, because these parameters belong to the whole machine.
sysctls() {
	for s in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
		mkdir -p "/run/node/sysctl/${s%/*}"
		cat "/proc/sys/$s" >"/run/node/sysctl/$s"
		mount --bind "/run/node/sysctl/$s" "/proc/sys/$s"
	done
	mkdir /run/node/proc # in a user namespace, the kernel allows a mount of /proc only if a complete /proc is already mounted
	mount -t proc proc /run/node/proc
}

network() {
	ip link set lo up
	ip netns add outside
	ip link add eth0 type veth peer name eth0 netns outside
	ip address add 192.0.2.1/24 dev eth0
	ip address add 2001:db8::1/64 dev eth0 nodad
	ip link set eth0 up
	ip -n outside link set lo up
	ip -n outside address add 192.0.2.2/24 dev eth0
	ip -n outside address add 2001:db8::2/64 dev eth0 nodad
	ip -n outside link set eth0 up
	ip route add default via 192.0.2.2
	ip -6 route add default via 2001:db8::2
}

none_programs() { :; }

containerd_programs() { echo "$containerd ctr runc"; }

containerd_configure() {
	cat >/run/node/config.toml <<-EOF
		version = 2
		oom_score = 0
		[plugins."io.containerd.internal.v1.opt"]
		  path = "/var/lib/containerd/opt"
		[plugins."io.containerd.grpc.v1.cri"]
		  sandbox_image = "podlace.test/busybox:1"
		  disable_apparmor = true
		  disable_tcp_service = true
		  stream_server_address = "127.0.0.1"
		  stream_server_port = "0"
		  restrict_oom_score_adj = true
		  [plugins."io.containerd.grpc.v1.cri".cni]
		    bin_dir = "${CNI_BIN:-/opt/cni/bin}"
		    conf_dir = "$conf"
		  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
		    runtime_type = "io.containerd.runc.v2"
		    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
		      BinaryName = "${RUNC:-runc}"
	EOF
}

containerd_start() { exec "$containerd" --config /run/node/config.toml; }

containerd_images() {
	local=
	if ctr images import --help | grep -q -e --local; then local=--local; fi
	for image in "$dir"/images/*.tar; do
		ctr --namespace k8s.io images import $local "$image" >/dev/null
	done
}

crio_programs() { echo "$CRIO/crio $CRIO/pinns ${RUNC:-runc} conmon skopeo"; }

# crio_runc writes the runc wrapper that CRI-O calls. It removes the limits of huge pages, which CRI-O sets even without hugetlb, and raises
# a negative oom_score_adj, which needs CAP_SYS_RESOURCE, to 0. containerd has options for both.
crio_runc() {
	cat >/run/node/runc <<-EOF
		#!/bin/sh
		bundle=
		for arg; do
			[ "\$bundle" != next ] || bundle=\$arg
			[ "\$arg" != --bundle ] || bundle=next
		done
		[ -z "\$bundle" ] || sed -zi 's/"oomScoreAdj": *-[0-9]*/"oomScoreAdj":0/; s/"hugepageLimits": *\[[^]]*\]/"hugepageLimits":[]/' \\
			"\$bundle/config.json"
		exec "$(command -v "${RUNC:-runc}")" "\$@"
	EOF
	chmod 755 /run/node/runc
}

crio_configure() {
	crio_runc
	cat >/run/node/crio.conf <<-EOF
		[crio]
		storage_driver = "overlay"
		log_dir = "/run/node/podlogs"
		version_file = "/run/crio/version"
		version_file_persist = "/var/lib/crio/version"
		clean_shutdown_file = "/var/lib/crio/clean.shutdown"
		[crio.api]
		listen = "/run/crio/crio.sock"
		stream_address = "127.0.0.1"
		stream_port = "0"
		[crio.runtime]
		cgroup_manager = "cgroupfs"
		default_runtime = "runc"
		pinns_path = "$CRIO/pinns"
		hooks_dir = []
		enable_criu_support = false
		[crio.runtime.runtimes.runc]
		runtime_path = "/run/node/runc"
		monitor_path = "$(command -v conmon)"
		monitor_cgroup = "pod"
		[crio.image]
		pause_image = "podlace.test/busybox:1"
		[crio.network]
		network_dir = "$conf"
		plugin_dirs = ["${CNI_BIN:-/opt/cni/bin}"]
		[crio.nri]
		enable_nri = false
	EOF
}

crio_start() { exec "$CRIO/crio" --config /run/node/crio.conf --config-dir ""; }

crio_images() {
	for image in "$dir"/images/*.tar; do
		tar -xOf "$image" index.json | grep -o '"io.containerd.image.name": *"[^"]*"' | cut -d'"' -f4 | while read -r as; do
			skopeo copy --quiet --insecure-policy "oci-archive:$image:${as##*:}" \
				"containers-storage:[overlay@/var/lib/containers/storage+/run/containers/storage]$as"
		done
	done
}

# supervise NAME COMMAND restarts the command when it ends, as a service manager does.
supervise() {
	export TMPDIR=/run/node/tmp
	while :; do
		"$2" &
		echo $! >"/run/node/$1.pid"
		wait $! || :
		sleep 0.1
		while [ -e /run/node/stay-down ]; do sleep 0.05; done
	done
}

inside() {
	pid=$(cat "$dir/pid") || die "no node runs in $dir"
	ns=/proc/$pid/ns
	exec nsenter --mount="$ns/mnt" --net="$ns/net" --uts="$ns/uts" --cgroup="$ns/cgroup" --pid="$ns/pid_for_children" \
		-- env --chdir="$PWD" "$@"
}

verb=${1-} dir=${2-} group=${3-}
case $verb$dir in
check | [a-z]*/*) ;;
*) die "usage: node.sh check | node.sh run DIR | node.sh exec DIR COMMAND [ARGUMENT..] (DIR is absolute)" ;;
esac
name=${NODE_NAME:-} conf=${CNI_CONF:-$dir/net.d}
runtime=${RUNTIME:-${CRIO:+crio}} runtime=${runtime:-containerd}
containerd=${CONTAINERD:-containerd}
case $containerd in
*/*) PATH=$(dirname "$containerd"):$PATH ;;
esac
case $verb in
check | run | join | split | init) "$verb" ;;
exec)
	shift 2
	inside "$@"
	;;
*) die "unknown verb $verb" ;;
esac
