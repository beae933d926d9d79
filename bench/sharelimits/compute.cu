// Runs a kernel that fills the GPU again and again, and says how often in a second.
//
// usage: compute SECONDS NAME [fault]; with fault, the last kernel writes where it may not
#include <chrono>
#include <cstdio>
#include <cstdlib>

constexpr int BLOCKS = 132 * 8, THREADS = 256, STEPS = 20000;

__global__ void multiply(float *out) {
    float a = threadIdx.x, b = 1.0001f;
    for (int step = 0; step < STEPS; step++) {
        a = a * b + 0.5f;
        b = b * 0.9999f + a * 1e-9f;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}

__global__ void fault(int *nowhere) { *nowhere = 1; }

int main(int count, char **arguments) {
    double seconds = atof(arguments[1]), passed = 0;
    float *out;
    long done = 0;
    cudaError_t error = cudaMalloc(&out, BLOCKS * THREADS * sizeof(float));
    multiply<<<BLOCKS, THREADS>>>(out);
    if (!error) error = cudaDeviceSynchronize();
    auto begun = std::chrono::steady_clock::now();
    while (!error && passed < seconds) {
        for (int kernel = 0; kernel < 4; kernel++) multiply<<<BLOCKS, THREADS>>>(out);
        error = cudaDeviceSynchronize();
        done += 4;
        passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    }
    if (count > 3) {
        fault<<<1, 1>>>((int *)16);
        error = cudaDeviceSynchronize();
    }
    printf("%s: %.0f kernels/s, error %d\n", arguments[2], passed ? done / passed : 0, error);
    return error != cudaSuccess;
}
