// What it costs to hand a layer's rows to the host and to take its result back, in seven ways, beside the same kernels in one graph
// without the host:
//
//     nvcc -O3 -arch=native worker/cuda/benches/hand_over.cu -lcuda -o hand_over && ./hand_over
//
// A layer is a few short kernels, one that writes rows of 7168 floats to the host's memory, and one that reads as many from there.
// The host copies them from one to the other, so what is left is the hand-over itself.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

static const int LAYERS = 58, KERNELS = 8, COLS = 7168, RUNS = 21;

#define CHECK(call)                                                                          \
    do {                                                                                     \
        int code = (int)(call);                                                              \
        if (code != 0) {                                                                     \
            fprintf(stderr, "%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, code);         \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

__global__ void work(float* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = x[i] * 0.5f + 1.0f;
}

__global__ void move(float* to, const float* from) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[i];
}

// One thread: everything before is visible to the host, then the flag.
__global__ void raise(volatile unsigned* flag) {
    __threadfence_system();
    *flag = 1;
}

__global__ void wait_for(volatile unsigned* flag) {
    while (*flag == 0) {
    }
    __threadfence_system();
}

struct Bench {
    cudaStream_t stream;
    float *x, *out, *in;               // Device; host; host.
    volatile unsigned *ready, *done;  // Host: one a layer.

    void layer(cudaStream_t s) {
        for (int k = 0; k < KERNELS; k++) work<<<COLS / 256, 256, 0, s>>>(x);
        move<<<COLS / 256, 256, 0, s>>>(out, x);
    }
    void take(cudaStream_t s) { move<<<COLS / 256, 256, 0, s>>>(x, in); }
    void serve() { memcpy(in, out, COLS * sizeof(float)); }

    cudaGraphExec_t graph(const std::function<void()>& queue) {
        cudaGraph_t captured;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        queue();
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&exec, captured, 0));
        return exec;
    }

    // Median microseconds of a step.
    double time(const std::function<void()>& step) {
        std::vector<double> times;
        for (int run = 0; run < RUNS + 3; run++) {
            memset((void*)ready, 0, LAYERS * 64);
            memset((void*)done, 0, LAYERS * 64);
            CHECK(cudaStreamSynchronize(stream));
            auto began = std::chrono::steady_clock::now();
            step();
            CHECK(cudaStreamSynchronize(stream));
            std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
            if (run >= 3) times.push_back(took.count());
        }
        std::sort(times.begin(), times.end());
        return times[RUNS / 2];
    }

    // Serves all layers of a step, by flags.
    void serve_flags() {
        for (int l = 0; l < LAYERS; l++) {
            while (ready[16 * l] == 0) {
            }
            std::atomic_thread_fence(std::memory_order_seq_cst);
            serve();
            std::atomic_thread_fence(std::memory_order_seq_cst);
            done[16 * l] = 1;
        }
    }
};

static void serve_node(void* bench) { ((Bench*)bench)->serve(); }

static CUdeviceptr on_device(volatile unsigned* host) {
    void* address;
    CHECK(cudaHostGetDevicePointer(&address, (void*)host, 0));
    return (CUdeviceptr)address;
}

int main() {
    Bench b;
    CHECK(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&b.x, COLS * sizeof(float)));
    CHECK(cudaMemset(b.x, 0, COLS * sizeof(float)));
    CHECK(cudaHostAlloc(&b.out, COLS * sizeof(float), cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostAlloc(&b.in, COLS * sizeof(float), cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostAlloc((void**)&b.ready, LAYERS * 64, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostAlloc((void**)&b.done, LAYERS * 64, cudaHostAllocMapped | cudaHostAllocPortable));

    cudaGraphExec_t whole = b.graph([&] {
        for (int l = 0; l < LAYERS; l++) b.layer(b.stream), b.take(b.stream);
    });
    double alone = b.time([&] { CHECK(cudaGraphLaunch(whole, b.stream)); });
    printf("hand-over: %d layers of %d kernels in one graph, the host does nothing: %.0f us\n", LAYERS, KERNELS + 2, alone);
    auto report = [&](const char* way, double us) {
        printf("hand-over by %s: %.0f us, %.1f us a layer\n", way, us, (us - alone) / LAYERS);
    };

    // A graph a layer: launched, waited for, its result copied.
    cudaGraphExec_t first = b.graph([&] { b.layer(b.stream); });
    report("a graph a layer, a wait and a copy", b.time([&] {
        for (int l = 0; l < LAYERS; l++) {
            CHECK(cudaGraphLaunch(first, b.stream));
            CHECK(cudaStreamSynchronize(b.stream));
            b.serve();
            CHECK(cudaMemcpyAsync(b.x, b.in, COLS * sizeof(float), cudaMemcpyHostToDevice, b.stream));
        }
    }));
    cudaGraphExec_t second = b.graph([&] { b.take(b.stream), b.layer(b.stream); });
    report("a graph a layer, a wait, read in place", b.time([&] {
        for (int l = 0; l < LAYERS; l++) {
            CHECK(cudaGraphLaunch(l == 0 ? first : second, b.stream));
            CHECK(cudaStreamSynchronize(b.stream));
            b.serve();
        }
    }));
    cudaGraphExec_t flagged = b.graph([&] { b.take(b.stream), b.layer(b.stream), raise<<<1, 1, 0, b.stream>>>(&b.ready[0]); });
    report("a graph a layer, a flag, read in place", b.time([&] {
        for (int l = 0; l < LAYERS; l++) {
            b.ready[0] = 0;
            CHECK(cudaGraphLaunch(flagged, b.stream));
            while (b.ready[0] == 0) {
            }
            b.serve();
        }
    }));

    cudaGraphExec_t nodes = b.graph([&] {
        for (int l = 0; l < LAYERS; l++) {
            b.layer(b.stream);
            CHECK(cudaLaunchHostFunc(b.stream, serve_node, &b));
            b.take(b.stream);
        }
    });
    report("host nodes of one graph", b.time([&] { CHECK(cudaGraphLaunch(nodes, b.stream)); }));

    cudaGraphExec_t operations = b.graph([&] {
        for (int l = 0; l < LAYERS; l++) {
            b.layer(b.stream);
            CHECK(cuStreamWriteValue32(b.stream, on_device(&b.ready[16 * l]), 1, CU_STREAM_WRITE_VALUE_DEFAULT));
            CHECK(cuStreamWaitValue32(b.stream, on_device(&b.done[16 * l]), 1, CU_STREAM_WAIT_VALUE_EQ));
            b.take(b.stream);
        }
    });
    auto launch_and_serve = [&](cudaGraphExec_t graph) {
        return b.time([&] {
            CHECK(cudaGraphLaunch(graph, b.stream));
            b.serve_flags();
        });
    };
    report("memory operations of one graph", launch_and_serve(operations));

    cudaGraphExec_t kernels = b.graph([&] {
        for (int l = 0; l < LAYERS; l++) {
            b.layer(b.stream);
            raise<<<1, 1, 0, b.stream>>>(&b.ready[16 * l]);
            wait_for<<<1, 1, 0, b.stream>>>(&b.done[16 * l]);
            b.take(b.stream);
        }
    });
    report("kernels that write and await flags in one graph", launch_and_serve(kernels));

    cudaGraphExec_t mixed = b.graph([&] {
        for (int l = 0; l < LAYERS; l++) {
            b.layer(b.stream);
            raise<<<1, 1, 0, b.stream>>>(&b.ready[16 * l]);
            CHECK(cuStreamWaitValue32(b.stream, on_device(&b.done[16 * l]), 1, CU_STREAM_WAIT_VALUE_EQ));
            b.take(b.stream);
        }
    });
    report("a kernel's flag and a memory operation's wait in one graph", launch_and_serve(mixed));
    return 0;
}
