#!/bin/sh
# Builds libvgpu.so of HAMi-core: build.sh SOURCE OUTPUT. No GPU, no driver and no CUDA toolkit is needed.
#
# CUDA_INCLUDE lists folders with cuda.h, nvml.h and crt/, separated by spaces.
set -eu

source=$(cd "$1" && pwd)
mkdir -p "$2"
output=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# HAMi-core finds headers and libraries below one folder.
mkdir -p "$work/cuda/include" "$work/stubs" "$work/source"
for folder in $CUDA_INCLUDE; do
    cp -R "$folder/." "$work/cuda/include/"
done
cp -R "$source/." "$work/source/"

# Its tests need nvcc and a GPU.
sed -i '/^add_subdirectory(test)/d' "$work/source/CMakeLists.txt"

# The driver's libraries are those of the container at run time: to link, empty ones suffice. Their names are not
# recorded in the library, so that programs without a GPU start, too.
for name in cuda nvidia-ml; do
    echo | gcc -shared -fPIC -x c - -o "$work/stubs/lib$name.so" -Wl,-soname,"lib$name.so.1"
done

CUDA_HOME="$work/cuda" LDFLAGS="-L$work/stubs -Wl,--as-needed" cmake -S "$work/source" -B "$work/build" \
    -DDLSYM_HOOK_ENABLE=1 -DMULTIPROCESS_LIMIT_ENABLE=1 -DHOOK_MEMINFO_ENABLE=1 -DHOOK_NVML_ENABLE=1 \
    -DCMAKE_BUILD_TYPE=Debug >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
cmake --build "$work/build" --target vgpu >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
strip --strip-debug "$work/build/libvgpu.so"
install -m 0755 "$work/build/libvgpu.so" "$output/libvgpu.so"

if readelf -d "$output/libvgpu.so" | grep -E 'NEEDED.*(libcuda|libnvidia-ml)'; then
    echo "build.sh: $output/libvgpu.so needs the driver's libraries; expected libc and its parts alone" >&2
    exit 1
fi
newest=$(readelf -V "$output/libvgpu.so" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
echo "$output/libvgpu.so needs glibc ${newest#GLIBC_} or newer"
