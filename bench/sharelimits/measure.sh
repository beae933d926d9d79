#!/bin/sh
# What HAMi-core and MPS limit on the GPU of this host: memory and compute time, alone and side by side.
# It changes no setting of the GPU. usage: measure.sh LIBRARY_OF_HAMI_CORE; it needs nvcc, gcc and NVIDIA's driver.
set -u
library=$1 here=$(dirname "$0") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cuda=$(dirname "$(dirname "$(command -v nvcc)")")
driver=$(ldconfig -p | awk '/libcuda.so.1 /{print $NF; exit}')
gcc -O1 -I"$cuda/include" "$here/allocate.c" "${driver:-/usr/local/nvidia/lib64/libcuda.so.1}" -o "$work/allocate" || exit 1
nvcc -arch=native -o "$work/compute" "$here/compute.cu" || exit 1
cd "$work" || exit 1
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.reserved,compute_mode --format=csv,noheader
gpu=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -1)

# hami REGION MIB PERCENT COMMAND...
hami() {
    region=$1 memory=$2 percent=$3
    shift 3
    CUDA_DEVICE_MEMORY_LIMIT_0=${memory}m CUDA_DEVICE_SM_LIMIT_0=$percent GPU_CORE_UTILIZATION_POLICY=force \
        CUDA_DEVICE_MEMORY_SHARED_CACHE=$work/$region LIBCUDA_LOG_LEVEL=0 LD_PRELOAD=$library "$@"
}

# mps MIB PERCENT COMMAND...
mps() {
    memory=$1 percent=$2
    shift 2
    CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="$gpu=${memory}M" CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$percent "$@"
}

echo "-- without limits"
./compute 4 alone
./compute 4 first & ./compute 4 second & wait
echo "-- HAMi-core: memory of one process, of two with one region, of two with their own"
hami one 4915 30 ./allocate 64 0
hami two 4915 30 ./allocate 64 4 40 & sleep 2; hami two 4915 30 ./allocate 64 0; wait
hami three 4915 30 ./allocate 64 2 & hami four 8192 50 ./allocate 64 2 & wait
echo "-- HAMi-core: compute time"
for percent in 60 30 10; do hami "alone-$percent" 40000 $percent ./compute 10 "alone $percent%"; done
hami beside-30 40000 30 ./compute 10 "beside 30%" & hami beside-60 40000 60 ./compute 10 "beside 60%" & wait

export CUDA_MPS_PIPE_DIRECTORY="$work/pipe" CUDA_MPS_LOG_DIRECTORY="$work/log"
mkdir pipe log
nvidia-cuda-mps-control -d || exit 1
echo "-- MPS: memory of one process, of two"
mps 4915 30 ./allocate 64 0
mps 4915 30 ./allocate 64 3 & mps 4915 30 ./allocate 64 3 & wait
echo "-- MPS: compute time"
for percent in 60 30 10; do mps 40000 $percent ./compute 4 "alone $percent%"; done
mps 40000 30 ./compute 4 "beside 30%" & mps 40000 60 ./compute 4 "beside 60%" & wait
echo "-- MPS with HAMi-core's limit of memory"
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30 hami both 4915 0 ./allocate 64 0
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30 hami both-compute 40000 0 ./compute 4 "30% of the threads"
echo "-- MPS: a fault of another process"
mps 40000 30 ./compute 6 "beside a fault" & sleep 2; mps 40000 30 ./compute 0 "the fault" fault; wait
mps 4915 30 ./allocate 64 0
echo quit | nvidia-cuda-mps-control
