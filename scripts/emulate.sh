#!/bin/bash
# Runs the C++ tests on an emulated CPU with AVX-512 (BF16, VNNI) and AMX: Linux in Bochs, on one core.
#
#   scripts/emulate.sh BUILD BOCHS KERNEL [test_...]
#
# BUILD: a build folder with PINNATE_BUILD_TESTS=ON. BOCHS: the program, 3.0 with what docs/emulation.md says it needs. KERNEL: a
# Debian kernel (vmlinuz), >= 6.1. Tests: where none are named, those of kernels.
# Also needs busybox-static, xorriso, isolinux, syslinux-common, bochsbios and vgabios, installed or unpacked under $ROOT.
#
# $ISAS: the tables to test, avx512,amx unless set; $OVERLAY: a folder with more files for the guest; $RUN: shell commands to run
# there instead of tests; $MEGS: its memory; $LOG: a file for what Bochs complains of.
set -euo pipefail
build=$1 bochs=$2 kernel=$3
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root usr=${ROOT:-}/usr
mkdir -p "$root"/{bin,dev,proc,sys,tmp,tests} "$work/iso"

cp "${ROOT:-}/bin/busybox" "$root/bin/"
if [ -n "${OVERLAY:-}" ]; then cp -a "$OVERLAY/." "$root/"; fi
if [ -z "${RUN:-}" ]; then
  if [ $# -eq 0 ]; then set -- test_{select,sample,rows,softmax_avx2,softmax_avx512,gemm,quant,attention}; fi
  for name in "$@"; do
    cp "$build/$name" "$root/tests/"
    ldd "$build/$name" | grep -o '/[^ ]*' | while read -r library; do cp -L --parents -u "$library" "$root/"; done
  done
  RUN='failed=0; for name in '$*'; do
    echo "=== $name"
    /tests/$name; status=$?
    echo "=== $name: exit $status, $(cut -d" " -f1 /proc/uptime) s"
    [ $status = 0 ] || failed=1
  done'
fi
cat > "$root/init" <<EOF
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
export PATH=/bin:/usr/bin PINNATE_TEST_ISAS=${ISAS:-avx512,amx}
grep -m1 'model name' /proc/cpuinfo; grep -m1 -o -E 'avx512_bf16|avx512_vnni|amx_[a-z0-9]+' /proc/cpuinfo | sort -u | xargs echo flags:
dmesg | grep 'Enabled xstate'
$RUN
echo "=== all done: \${failed:-\$?}"
poweroff -f
EOF
chmod +x "$root/init"
(cd "$root" && find . | bin/busybox cpio -o -H newc) > "$work/iso/initrd"

cp "$kernel" "$work/iso/vmlinuz"
cp "$usr/lib/ISOLINUX/isolinux.bin" "$usr/lib/syslinux/modules/bios/ldlinux.c32" "$work/iso/"
# What this CPU claims and Bochs doesn't do right: 5-level page tables across SMM; FSRM without ERMS, which the kernel's memmove
# takes for both.
cat > "$work/iso/isolinux.cfg" <<EOF
default linux
label linux
  kernel vmlinuz
  append initrd=initrd console=ttyS0,115200 nokaslr mitigations=off nopku no5lvl clearcpuid=fsrm tsc=reliable lpj=100000 loglevel=4
EOF
xorriso -as mkisofs -quiet -o "$work/guest.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table "$work/iso"

cat > "$work/bochsrc" <<EOF
display_library: nogui
cpu: model=sapphire_rapids, count=1, ips=50000000
clock: sync=none
memory: guest=${MEGS:-512}, host=${MEGS:-512}
romimage: file=$usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=$usr/share/vgabios/vgabios.bin
ata0-master: type=cdrom, path=$work/guest.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=/dev/stdout
log: ${LOG:-/dev/null}
panic: action=fatal
error: action=report
info: action=ignore
EOF
# It ends by a "panic" when the guest turns itself off.
"$bochs" -q -f "$work/bochsrc" < /dev/null 2> /dev/null | tee "$work/output" | while IFS= read -r line; do echo "$(date +%T) $line"; done || true
grep -q '=== all done: 0' "$work/output"
