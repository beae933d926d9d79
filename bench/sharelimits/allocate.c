/* Allocates pieces of a GPU's memory until one is refused, says how much it got, and keeps it for some seconds.

   usage: allocate PIECE_MIB SECONDS [MOST_PIECES] */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments) {
    size_t piece = strtoul(arguments[1], NULL, 10) << 20, left = 0, all = 0;
    long most = count > 3 ? atol(arguments[3]) : 1L << 20, pieces = 0;
    CUdevice gpu;
    CUcontext context;
    CUdeviceptr at;
    CUresult result = cuInit(0);
    if (!result) result = cuDeviceGet(&gpu, 0);
    if (!result) result = cuDevicePrimaryCtxRetain(&context, gpu);
    if (!result) result = cuCtxSetCurrent(context);
    if (result) {
        printf("no context: error %d\n", result);
        return 1;
    }
    cuMemGetInfo(&left, &all);
    printf("it sees %zu of %zu MiB free\n", left >> 20, all >> 20);
    while (pieces < most && !(result = cuMemAlloc(&at, piece))) pieces++;
    printf("it got %ld MiB, then error %d\n", pieces * (long)(piece >> 20), result);
    fflush(stdout);
    sleep(atoi(arguments[2]));
    return 0;
}
