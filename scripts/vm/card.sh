#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# card.sh COMMAND...: runs exec.sh in a machine with two NUMA nodes. Each node has a network card with VFs (Intel 82576, drivers igb and igbvf)
# behind an IOMMU, so that vfio-pci can bind the VFs. A cable connects the cards. PODLACE_PF is the address of the first card. A third card,
# at PODLACE_LONE on NUMA node 1, has no VFs, like a VF that a machine got without its PF.
set -euo pipefail
export PODLACE_PF=0000:21:00.0 PODLACE_LONE=0000:62:00.0 VM_MODULES="${VM_MODULES:-} igb igbvf vfio-pci e1000e" VM_KERNEL="${VM_KERNEL:-} intel_iommu=on iommu=pt pci=realloc"
# QEMU's emulation can crash if one processor uses a device while another adds or removes a VF (iotlb_to_section).
export VM_THREADS=single
devices=(-smp "2,sockets=2,cores=1" -device "intel-iommu,intremap=on,device-iotlb=on")
for node in 0 1; do
  # Bus 0x21 is the port behind the bridge with bus 0x20 on NUMA node 0. Bus 0x61 is the corresponding port on node 1.
  devices+=(-object "memory-backend-ram,id=memory$node,size=1G" -numa "node,nodeid=$node,cpus=$node,memdev=memory$node"
    -device "pxb-pcie,id=bridge$node,bus_nr=$((32 + 64 * node)),bus=pcie.0,numa_node=$node"
    -device "pcie-root-port,id=port$node,bus=bridge$node,chassis=$((node + 1)),slot=1"
    -netdev "hubport,id=cable$node,hubid=0" -device "igb,bus=port$node,netdev=cable$node,mac=52:54:00:00:0$node:01")
done
devices+=(-device "pcie-root-port,id=port2,bus=bridge1,chassis=3,slot=2" -netdev "hubport,id=cable2,hubid=0"
  -device "e1000e,bus=port2,netdev=cable2,mac=52:54:00:00:02:01")
export VM_DEVICES="${devices[*]} ${VM_DEVICES:-}"
exec "$(dirname "$0")/exec.sh" "$@"
