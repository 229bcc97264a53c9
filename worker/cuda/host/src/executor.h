// Runs a launch: blocks one after the other, a block's threads as fibers that switch at barriers and warp operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "hearth_host_abi.h"
#include "fault.h"
#include "fiber.h"
#include "launch.h"
#include "race_clock.h"

namespace hearth {

enum class State : uint8_t { RUNNABLE, AT_BARRIER, AT_WARP_OPERATION, EXITED };

enum class WarpOperation : uint8_t { SYNC, SHUFFLE, BALLOT, MATCH, MMA_BF16, MMA_E4M3, LDMATRIX, WGMMA, WGMMA_WAIT };

// A lane's part of a wgmma that has not been waited for.
struct Product {
    float* d;
    unsigned long long a;                // descriptors; a is in registers if the elements are bf16
    unsigned long long b;
    bool is_bf16;
    unsigned columns;
    unsigned registers[4];
    bool accumulate;
    bool is_first;                       // of those in flight with these accumulators
    HearthHostSite site;
    float before[64];                    // the accumulators' contents at the start of the first
};

// A lane's input to a warp operation and its result.
struct Operand {
    unsigned long long value;
    int source;
    const void* row;
    bool transposed;
    HearthHostFloats d;
    HearthHostWords a;
    HearthHostPair b;
    Product product;
};

// One cp.async that has not landed.
struct AsyncCopy {
    char* shared;
    const char* global;
    unsigned bytes;
    bool valid;
    HearthHostSite site;
};

struct Fiber {
    void* stack;
    char* stack_low;
    char* stack_high;
    unsigned thread;
    unsigned index[3];
    State state;
    WarpOperation operation;
    HearthHostSite site;
    unsigned mask;
    Label label;                         // this thread, since the last barrier or __syncwarp that it passed
    Operand operand;
    std::vector<AsyncCopy> copies;
    std::vector<size_t> group_ends;      // of the committed groups, in `copies`
    bool copies_unfenced = false;        // some have landed since the last fence.proxy.async
    std::vector<Product> products;
    std::vector<size_t> product_group_ends;
    bool accumulators_fenced = false;    // by wgmma.fence, since the last wait

    unsigned warp() const { return thread / 32; }
    unsigned lane() const { return thread % 32; }
};

inline bool same_site(const HearthHostSite& a, const HearthHostSite& b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// The running thread.
extern Fiber* running_fiber;

class Executor {
public:
    Executor();

    // Returns the first fault, if any.
    Fault run(Device& device, const Launch& launch);

    // The functions below are called on a thread's own stack.
    Fiber& lane(unsigned warp, unsigned lane) { return fibers_[warp * 32 + lane]; }
    unsigned wait_barrier(HearthHostSite site, bool predicate);
    void wait_warp(HearthHostSite site, WarpOperation operation, unsigned mask);
    // `kind` begins the text of the fault, followed by the location of `at` and by `details`.
    [[noreturn]] void fail(CUresult code, const char* kind, const std::string& details, const Fiber& at);
    [[noreturn]] void exit_thread();
    unsigned live_lanes() const;
    // All advances of the clock go through this: it may have to restart.
    void advance_clock(void (RaceClock::*step)());
    const Launch& launch() const { return *launch_; }
    Device& device() { return *device_; }
    void** values() { return values_.data(); }
    unsigned block_index() const { return block_; }
    std::string block_text(unsigned block) const;
    std::string thread_text(unsigned thread) const;

private:
    void run_block(unsigned block);
    void start_thread(unsigned thread);
    Fiber* pick();
    void switch_to(Fiber* next);
    void yield();
    void release_barrier();
    void make_runnable(Fiber& fiber);
    void report_stall();
    void record(CUresult code, const char* kind, const std::string& details, const Fiber& at);
    std::string state_text(const Fiber& fiber) const;

    Stacks stacks_;
    std::unique_ptr<Fiber[]> fibers_;
    Device* device_ = nullptr;
    const Launch* launch_ = nullptr;
    std::vector<void*> values_;
    void* main_stack_ = nullptr;
    void** running_stack_ = &main_stack_;    // where the running stack's pointer is saved
    Fault fault_;
    unsigned block_ = 0;
    unsigned threads_ = 0;
    unsigned exited_ = 0;
    unsigned at_barrier_ = 0;
    unsigned barrier_count_ = 0;
    unsigned runnable_[MAX_THREADS / 32];    // lanes by warp
    unsigned arrived_[MAX_THREADS / 32];     // lanes waiting at a warp operation
    unsigned runnable_warps_ = 0;
    uint64_t random_ = 0;
};

Executor& executor();

// Performs a warp operation for all lanes of `mask`, which have all arrived at it.
void complete_warp_operation(Executor& executor, unsigned warp, WarpOperation operation, unsigned mask);

// The name of an operation as CUDA C++ spells it.
const char* operation_name(WarpOperation operation);

}  // namespace hearth
