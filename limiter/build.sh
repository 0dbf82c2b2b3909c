#!/bin/sh
# Builds the limiter's shadow libraries into a folder: build.sh FOLDER
#
# They need nothing but the C library and the real driver. Both are named by empty stubs with their sonames, so that a
# symbol of the C library carries no version and images with an older one than this machine's have it too.
set -eu
folder=${1:?build.sh FOLDER}
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
target=${CARGO_TARGET_DIR:-target}
stubs=$target/limiter-stubs

mkdir -p "$stubs" "$folder/compute"
stub() {
    for name in $2; do printf 'void %s(void) {}\n' "$name"; done |
        cc -shared -nostdlib -x c -Wno-builtin-declaration-mismatch -fno-builtin -Wl,-soname,"$1" -o "$stubs/$1" -
}
stub libc.so.6 'memcpy memmove memset memcmp bcmp strlen dlopen dlsym'
stub libcuda-driver.so.1 ''
stub libnvidia-ml-driver.so.1 ''

# library PACKAGE BUILT SONAME REAL OUTPUT [cargo's arguments]
library() {
    package=$1 built=$2 soname=$3 real=$4 output=$5
    shift 5
    stubs_here=$(cd "$stubs" && pwd)
    "$cargo" rustc --quiet --profile limiter --package "$package" --crate-type cdylib "$@" -- \
        -C panic=abort -C "link-args=-nostdlib -nostartfiles -Wl,-soname,$soname -Wl,--no-as-needed -Wl,-z,now \
$stubs_here/$real $stubs_here/libc.so.6"
    # By rename: a container may have the old one mapped.
    cp "$target/limiter/$built" "$output.new"
    mv "$output.new" "$output"
}
library gpufence-limiter-cuda libgpufence_cuda.so libcuda.so.1 libcuda-driver.so.1 "$folder/libcuda.so.1"
library gpufence-limiter-cuda libgpufence_cuda.so libcuda.so.1 libcuda-driver.so.1 "$folder/compute/libcuda.so.1" --features compute
library gpufence-limiter-nvml libgpufence_nvml.so libnvidia-ml.so.1 libnvidia-ml-driver.so.1 "$folder/libnvidia-ml.so.1"
