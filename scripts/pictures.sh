#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Draws the pictures of docs/: diagrams from docs/*.dot with Graphviz, and stills of a terminal from real runs of the demo, `podlace doctor`
# and `podlace top` in namespaces of their own. It needs what `make build` made. Usage: scripts/pictures.sh [diagrams|stills]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/bin

# Comments with the checksum of the source let a test find a diagram that is older than its source.
diagrams() {
	for source in docs/*.dot; do
		sum=$(cat "$source" docs/dark.css | sha256sum | cut -c1-16)
		dot -Tsvg "$source" | sed -e '/xmlns:xlink/r docs/dark.css' -e "\$a<!-- $sum -->" >"${source%.dot}.svg"
	done
}

# still FILE TITLE draws the lines of stdin. Spaces become no-break spaces, which no renderer joins, and textLength holds columns in any font.
still() {
	awk -v title="$2" '
		function escape(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/ /, "\302\240", s); return s }
		function coloured(s) {
			if (!match(s, /^error |^[0-9]+ ok|  ok|  MISS/)) return escape(s)
			return escape(substr(s, 1, RSTART - 1)) "<tspan class=\"" (substr(s, RSTART, RLENGTH) ~ /ok/ ? "good" : "bad") "\">" \
				escape(substr(s, RSTART, RLENGTH)) "</tspan>" escape(substr(s, RSTART + RLENGTH))
		}
		{ line[NR] = $0; wide = length($0) > wide ? length($0) : wide }
		END {
			if (NR == 0) exit 1
			printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", \
				wide * 7.8 + 28, NR * 18 + 24, wide * 7.8 + 28, NR * 18 + 24
			print "<title>" title "</title>"
			print "<style>text { font: 13px ui-monospace, \"DejaVu Sans Mono\", monospace; fill: #1f2328 } rect { fill: #f6f8fa; stroke: #d1d9e0 }"
			print ".typed { font-weight: bold } .good { fill: #1a7f37 } .bad { fill: #cf222e }"
			print "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #161b22; stroke: #30363d } .good { fill: #3fb950 }"
			print ".bad { fill: #ff7b72 } }</style>"
			print "<rect x=\"0.5\" y=\"0.5\" width=\"" wide * 7.8 + 27 "\" height=\"" NR * 18 + 23 "\" rx=\"8\"/>"
			for (n = 1; n <= NR; n++) {
				if (line[n] == "") continue
				printf "<text x=\"14\" y=\"%d\" textLength=\"%.1f\"%s>%s</text>\n", n * 18 + 12, length(line[n]) * 7.8, \
					line[n] ~ /^\$ / ? " class=\"typed\"" : "", coloured(line[n])
			}
			print "</svg>"
		}' >"$1.new"
	mv "$1.new" "$1"
}

# shown prints a command as it is typed, and then what it prints. A command may exit with a status above 0.
shown() {
	echo "\$ $*"
	"$@" || true
}

demo() {
	lines=$(make -s demo ARGS=)
	echo '$ make demo'
	awk -F '   *' '/^step / || /^(ADD pod-a|ping .*IPv6|hostPort tcp from (outside|127|pod-a itself \())/ || /^(pod-a to outside|tcp host to pod-a,)/ ||
		/^(CHECK pod-a|DEL pod-b|leftovers)/ { printf "%-40s  %-21s  %s\n", $1, $3, $4 }
		/^[0-9]+ ok,/ { print ""; print; exit }' <<<"$lines"
}

# pod NAME ID LIMITS adds a pod as a container runtime does.
pod() {
	ip netns add "$1"
	CNI_COMMAND=ADD CNI_CONTAINERID=$2 CNI_NETNS=/run/netns/$1 CNI_IFNAME=eth0 CNI_PATH=$bin CNI_ARGS="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=$1" \
		"$bin/podlace-pod" >/run/result <<-EOF
		{"cniVersion": "1.1.0", "name": "podlace", "type": "podlace-pod", "isDefaultGateway": true, "ipMasq": true,
		 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.58.0.0/16"}]]},
		 "capabilities": {"portMappings": true, "bandwidth": true}, "runtimeConfig": {$3}}
	EOF
}

# send ADDRESS PACKETS sends so many packets of 1,400 bytes, and again after 20 ms.
send() {
	while sleep 0.02; do dd if=/dev/zero bs=1400 count="$2" >"/dev/udp/$1/9"; done 2>/dev/null
}

# node makes a node with three pods in the namespaces in which it runs. Nobody listens to the packets, and a rule keeps ICMP errors away.
node() {
	mount -t tmpfs tmpfs /run
	mount -t tmpfs tmpfs /var/lib
	mount -t sysfs sysfs /sys
	mkdir /run/netns
	ip link set lo up
	PATH=$bin:$PATH
	pod web-0 5d1f8a2b7c90 '"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
		"bandwidth": {"ingressRate": 20000000, "ingressBurst": 80000, "egressRate": 20000000, "egressBurst": 80000}'
	pod db-0 91c04be7a3d2 ''
	pod cron-7 c7e5013f9a44 '"bandwidth": {"egressRate": 5000000, "egressBurst": 80000}'
	for name in web-0 db-0 cron-7; do
		ip netns exec $name nft 'add table inet sink; add chain inet sink in { type filter hook input priority 0; };
			add rule inet sink in udp dport 9 drop'
	done
}

stills_of_node() {
	node
	export -f send
	send 10.58.0.2 100000 & senders=$!
	ip netns exec db-0 bash -c 'send 10.58.0.2 30' & senders+=" $!"
	ip netns exec cron-7 bash -c 'send 10.58.0.3 8' & senders+=" $!"
	sleep 2
	shown podlace top --once | still docs/top.svg "Output of podlace top --once"
	kill $senders
	{
		shown nft flush ruleset
		shown podlace doctor rules ports records
		shown podlace reload
		shown podlace doctor rules ports records
	} | still docs/doctor.svg "A flush of the firewall, found by podlace doctor and repaired by podlace reload"
}

case ${1:-all} in
all) diagrams && "$0" stills ;;
diagrams) diagrams ;;
stills)
	demo | still docs/demo.svg "Output of make demo"
	[ "$(id -u)" = 0 ] || root=--map-root-user
	unshare --mount --net --pid --fork --kill-child ${root:-} "$0" node
	;;
node) stills_of_node ;;
*)
	echo "usage: $0 [diagrams|stills]" >&2
	exit 2
	;;
esac
