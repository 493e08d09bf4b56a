#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# exec.sh COMMAND...: starts a virtual machine, runs a command as root in the same folder of the guest, and exits with the command's status.
# The machine ends when the command ends. exec.sh is made for "go test -exec". The guest sees the host's file system, and loses all its writes
# when it ends. The guest gets the environment variables whose names begin with KERNELTEST or PODLACE_.
#   VM           folder that setup.sh has filled
#   VM_LINUX     the kernel's name in scripts/vm/kernels (default 6.12)
#   VM_MODULES   modules to load before the command
#   VM_TIMEOUT   seconds (default 1200)
#   VM_DEVICES   more arguments for QEMU, such as network cards
#   VM_KERNEL    more arguments for the kernel
#   VM_THREADS   single: emulate all processors in one thread
set -euo pipefail
: "${VM:?is not set: the folder that setup.sh has filled}"
kernel=$VM/linux-${VM_LINUX:-6.12}
exec 9<"$VM/lock" && flock -s 9 # the machine is not recreated during the command
shared=$(mktemp -d "$VM/run.XXXXXX")
trap 'rm -rf "$shared"' EXIT
{
  echo '#!/bin/bash'
  for name in ${!KERNELTEST*} ${!PODLACE_*}; do printf 'export %s=%q\n' "$name" "${!name}"; done
  echo "modprobe() { '$VM/bin/modprobe' \"\$@\"; }"
  [ -z "${VM_MODULES:-}" ] || echo "modprobe -a $VM_MODULES"
  echo 'ip link set lo up'
  echo 'echo 4194304 >/proc/sys/net/core/wmem_max' # the plugins can exceed this limit, but tests in user namespaces cannot
  printf 'cd %q || exit\nexec' "$PWD"
  printf ' %q' "$@"
  echo
} >"$shared/run"
chmod +x "$shared/run"

# Hardware virtualization is used if the processor has it. /dev/kvm alone is not enough: it also exists where ordinary guests cannot run.
accelerator=(-accel "tcg,thread=${VM_THREADS:-multi},tb-size=512" -cpu max)
if grep -qwE 'vmx|svm' /proc/cpuinfo && [ -w /dev/kvm ]; then accelerator=(-accel kvm -cpu host); fi
# On a busy machine, a guest measures its clock frequency wrongly and takes a late timer interrupt for a broken timer. It therefore gets the
# frequency, and no timer check.
khz=$(awk '/MHz/ {printf "%d", $4 * 1000; exit}' /proc/cpuinfo)
q=$VM/qemu/usr
export QEMU_MODULE_DIR=$q/lib/x86_64-linux-gnu/qemu LD_LIBRARY_PATH=$q/lib/x86_64-linux-gnu:$VM/qemu/lib/x86_64-linux-gnu
status=0
# shellcheck disable=SC2086 # VM_DEVICES is words
timeout -k 10 "${VM_TIMEOUT:-1200}" "$q/bin/qemu-system-x86_64" -L "$q/share/qemu" -L "$q/share/seabios" -L "$q/lib/ipxe/qemu" \
  -nodefaults -no-user-config -display none -monitor none -no-reboot -machine q35,kernel-irqchip=split "${accelerator[@]}" -smp 2 -m 2G \
  -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,bus=pcie.0,fsdev=root,mount_tag=root \
  -fsdev local,id=shared,path="$shared",security_model=none -device virtio-9p-pci,bus=pcie.0,fsdev=shared,mount_tag=shared \
  -device virtio-serial-pci,bus=pcie.0 -chardev file,id=output,path=/dev/stdout,append=on -device virtserialport,chardev=output,name=output \
  -chardev file,id=console,path="$shared/console" -serial chardev:console ${VM_DEVICES:-} -kernel "$kernel/vmlinux" -initrd "$kernel/initrd" \
  -append "console=ttyS0 panic=-1 quiet podlace.vm=$kernel ${khz:+tsc=reliable tsc_early_khz=$khz} rcupdate.rcu_expedited=1 nowatchdog no_timer_check nokaslr mitigations=off random.trust_cpu=on cryptomgr.notests ${VM_KERNEL:-}" \
  </dev/null 2>"$shared/qemu" | cat || status=$?
if [ -s "$shared/exit" ]; then exit "$(cat "$shared/exit")"; fi
case $status in 124 | 137) echo "$0: the virtual machine took longer than ${VM_TIMEOUT:-1200} s" ;; *) echo "$0: the virtual machine died, QEMU exited with $status" ;; esac >&2
for log in qemu console; do [ ! -e "$shared/$log" ] || tail -n 20 "$shared/$log"; done >&2
exit 125
