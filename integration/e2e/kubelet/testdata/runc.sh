#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# runc.sh is runc without cpusets, since the kubelet believes in CPUs and NUMA nodes that the machine does not have, and without limits of
# huge pages, which CRI-O writes whether or not hugetlb is mounted.
strip='s/"\(cpus\|mems\)": *"[^"]*"/"\1":""/g; s/"hugepageLimits": *\[[^]]*\]/"hugepageLimits":[]/g'
for arg; do
	case $last in
	--bundle) sed -z -i "$strip" "$arg/config.json" ;;
	esac
	if [ "$arg" = update ]; then
		sed -z "$strip" | runc "$@"
		exit
	fi
	last=$arg
done
exec runc "$@"
