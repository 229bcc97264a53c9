// The interface between a kernel's object and the driver library. Both include it, the kernel without any system header.
#pragma once

// A place in a kernel's source.
struct HearthHostSite {
    const char* file;
    unsigned line;
};

// Indices of the running thread, set whenever the scheduler resumes one.
struct HearthHostIndices {
    unsigned thread[3];
    unsigned block[3];
    unsigned block_dim[3];
    unsigned grid_dim[3];
};

// Fragments are passed by value: if the address of one were taken, every later access to it would be checked as memory.
struct HearthHostFloats {
    float v[4];
};
struct HearthHostWords {
    unsigned v[4];
};
struct HearthHostPair {
    unsigned v[2];
};

enum HearthHostAtomic {
    HEARTH_HOST_ADD,
    HEARTH_HOST_ADD_FLOAT,
    HEARTH_HOST_MAX,
    HEARTH_HOST_MAX_UNSIGNED,
    HEARTH_HOST_MIN,
    HEARTH_HOST_MIN_UNSIGNED,
    HEARTH_HOST_AND,
    HEARTH_HOST_OR,
    HEARTH_HOST_XOR,
    HEARTH_HOST_EXCHANGE,
    HEARTH_HOST_COMPARE,
};

#pragma GCC visibility push(default)
extern "C" {
extern HearthHostIndices hearth_host_indices;

void hearth_host_sync_threads(HearthHostSite site);
int hearth_host_sync_threads_count(HearthHostSite site, int predicate);
void hearth_host_sync_warp(HearthHostSite site, unsigned mask);
unsigned long long hearth_host_shuffle(HearthHostSite site, unsigned mask, unsigned long long value, int source);
unsigned hearth_host_ballot(HearthHostSite site, unsigned mask, int predicate);
unsigned hearth_host_match(HearthHostSite site, unsigned mask, unsigned long long value);
unsigned hearth_host_active_mask();
unsigned hearth_host_lane();
[[noreturn]] void hearth_host_trap(HearthHostSite site);

unsigned hearth_host_atomic_32(void* address, HearthHostAtomic operation, unsigned value, unsigned expected);
unsigned long long hearth_host_atomic_64(void* address, HearthHostAtomic operation, unsigned long long value,
                                         unsigned long long expected);

void* hearth_host_dynamic_shared();
HearthHostFloats hearth_host_mma_bf16(HearthHostSite site, HearthHostFloats d, HearthHostWords a, HearthHostPair b);
HearthHostFloats hearth_host_mma_e4m3(HearthHostSite site, HearthHostFloats d, HearthHostWords a, HearthHostPair b);
HearthHostWords hearth_host_ldmatrix(HearthHostSite site, const void* shared, int transposed);
void hearth_host_cp_async(HearthHostSite site, int bytes, void* shared, const void* global, int valid);
void hearth_host_cp_async_commit();
void hearth_host_cp_async_wait(int groups);
void hearth_host_fence_async_proxy();
unsigned hearth_host_shared_address(const void* shared);
void hearth_host_wgmma(HearthHostSite site, float* d, unsigned long long a, unsigned long long b, int accumulate);
void hearth_host_wgmma_bf16(HearthHostSite site, float* d, const unsigned* a, unsigned long long b, int accumulate, int columns);
void hearth_host_wgmma_fence();
void hearth_host_wgmma_commit();
void hearth_host_wgmma_wait(HearthHostSite site, int groups);
}
#pragma GCC visibility pop
