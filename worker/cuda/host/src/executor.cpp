#include "executor.h"

#include <cstring>

#include "access.h"
#include "async_copy.h"
#include "config.h"
#include "device.h"
#include "shared_memory.h"
#include "stream_order.h"
#include "warpgroup.h"

HearthHostIndices hearth_host_indices;

namespace hearth {

Fiber* running_fiber;

namespace {

// Threads reach __syncthreads at one place, and a named barrier wherever they are.
bool same_barrier(const Fiber& a, const Fiber& b) {
    return a.barrier == b.barrier && (a.barrier != 0 || same_site(a.site, b.site));
}

void thread_main() {
    Executor& e = executor();
    e.launch().function->call(e.values());
    e.exit_thread();
}

}  // namespace

Executor& executor() {
    static auto& e = *new Executor;
    return e;
}

Executor::Executor() : fibers_(new Fiber[MAX_THREADS]), random_(config().seed * 2 + 1) {
    for (unsigned thread = 0; thread < MAX_THREADS; thread++) {
        fibers_[thread].thread = thread;
        fibers_[thread].stack_low = stacks_.low(thread);
        fibers_[thread].stack_high = stacks_.high(thread);
    }
}

Fault Executor::run(Device& device, const Launch& launch) {
    device_ = &device;
    launch_ = &launch;
    threads_ = launch.threads();
    fault_ = Fault();
    values_.clear();
    for (size_t offset : launch.offsets) values_.push_back(const_cast<char*>(launch.values.data()) + offset);
    for (int i = 0; i < 3; i++) {
        hearth_host_indices.block_dim[i] = launch.block[i];
        hearth_host_indices.grid_dim[i] = launch.grid[i];
    }
    for (unsigned thread = 0; thread < threads_; thread++) {
        unsigned* index = fibers_[thread].index;
        index[0] = thread % launch.block[0];
        index[1] = thread / launch.block[0] % launch.block[1];
        index[2] = thread / launch.block[0] / launch.block[1];
    }
    shared_memory.begin_launch(*launch.function, launch.dynamic_shared_bytes);
    if (config().checks) begin_access_checks(device);
    advance_clock(&RaceClock::begin_launch);
    stream_order.begin(race_clock.now(), "kernel " + launch.function->name);
    uint64_t blocks = (uint64_t)launch.grid[0] * launch.grid[1] * launch.grid[2];
    for (uint64_t block = 0; block < blocks && !fault_; block++) run_block((unsigned)block);
    return fault_;
}

void Executor::run_block(unsigned block) {
    block_ = block;
    hearth_host_indices.block[0] = block % launch_->grid[0];
    hearth_host_indices.block[1] = block / launch_->grid[0] % launch_->grid[1];
    hearth_host_indices.block[2] = block / launch_->grid[0] / launch_->grid[1];
    shared_memory.begin_block();
    advance_clock(&RaceClock::begin_block);
    exited_ = at_barrier_ = barrier_count_ = 0;
    memset(runnable_, 0, sizeof runnable_);
    memset(arrived_, 0, sizeof arrived_);
    runnable_warps_ = 0;
    for (unsigned thread = 0; thread < threads_; thread++) start_thread(thread);
    running_fiber = &fibers_[0];
    switch_to(pick());
    if (!fault_ && exited_ != threads_) report_stall();
    for (unsigned thread = 0; thread < threads_; thread++) {
        abandon_copies(fibers_[thread]);
        abandon_products(fibers_[thread]);
    }
}

void Executor::start_thread(unsigned thread) {
    Fiber& fiber = fibers_[thread];
    fiber.stack = stacks_.prepare(thread, thread_main);
    fiber.label = make_label(race_clock.now(), thread);
    make_runnable(fiber);
}

void Executor::make_runnable(Fiber& fiber) {
    fiber.state = State::RUNNABLE;
    runnable_[fiber.warp()] |= 1u << fiber.lane();
    runnable_warps_ |= 1u << fiber.warp();
}

// Picks the next thread to run: the lowest lane of the running warp while it has one, or, when shuffled, any lane of some warp.
Fiber* Executor::pick() {
    if (runnable_warps_ == 0) return nullptr;
    unsigned warp = running_fiber->warp(), first_lane = 0;
    if (config().shuffled) {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        first_lane = random_ >> 32 & 31u;
        if ((random_ >> 40 & 3u) == 0) warp = random_ >> 48 & 31u;
    }
    auto from = [](unsigned set, unsigned first) {
        unsigned above = set & (~0u << first);
        return (unsigned)__builtin_ctz(above != 0 ? above : set);
    };
    warp = from(runnable_warps_, warp);
    return &lane(warp, from(runnable_[warp], first_lane));
}

// If nothing can run, control returns to run_block.
void Executor::switch_to(Fiber* next) {
    void** save = running_stack_;
    running_stack_ = next != nullptr ? &next->stack : &main_stack_;
    if (next != nullptr) {
        running_fiber = next;
        memcpy(hearth_host_indices.thread, next->index, sizeof next->index);
    }
    hearth_host_switch_stack(save, *running_stack_);
}

void Executor::yield() {
    unsigned warp = running_fiber->warp();
    runnable_[warp] &= ~(1u << running_fiber->lane());
    if (runnable_[warp] == 0) runnable_warps_ &= ~(1u << warp);
    switch_to(pick());
}

void Executor::exit_thread() {
    running_fiber->state = State::EXITED;
    exited_++;
    yield();
    __builtin_unreachable();
}

unsigned Executor::wait_barrier(HearthHostSite site, unsigned barrier, bool predicate) {
    Fiber& self = *running_fiber;
    self.site = site;
    self.barrier = barrier;
    self.state = State::AT_BARRIER;
    self.operand.value = predicate;
    if (++at_barrier_ == threads_) {
        release_barrier();
    } else {
        yield();
    }
    return barrier_count_;
}

void Executor::release_barrier() {
    const Fiber& self = *running_fiber;
    advance_clock(&RaceClock::barrier);
    barrier_count_ = 0;
    for (unsigned thread = 0; thread < threads_; thread++) {
        Fiber& fiber = fibers_[thread];
        if (!same_barrier(fiber, self)) {
            fail(CUDA_ERROR_LAUNCH_FAILED, "divergent barrier",
                 format("while %s %s", thread_text(thread).c_str(), state_text(fiber).c_str()), self);
        }
        barrier_count_ += fiber.operand.value != 0;
        fiber.label = make_label(race_clock.now(), thread);
        make_runnable(fiber);
    }
    at_barrier_ = 0;
}

void Executor::wait_warp(HearthHostSite site, WarpOperation operation, unsigned mask) {
    Fiber& self = *running_fiber;
    unsigned warp = self.warp();
    self.site = site;
    self.operation = operation;
    self.mask = mask;
    self.state = State::AT_WARP_OPERATION;
    if ((mask >> self.lane() & 1u) == 0) {
        fail(CUDA_ERROR_LAUNCH_FAILED, "warp operation", format("its mask %08x does not name its own lane", mask), self);
    }
    arrived_[warp] |= 1u << self.lane();
    bool complete = (arrived_[warp] & mask) == mask;
    for (unsigned left = mask; complete && left != 0; left &= left - 1) {
        const Fiber& other = lane(warp, __builtin_ctz(left));
        complete = other.operation == operation && other.mask == mask && same_site(other.site, site);
    }
    if (!complete) {
        yield();
        return;
    }
    complete_warp_operation(*this, warp, operation, mask);
    arrived_[warp] &= ~mask;
    for (unsigned left = mask; left != 0; left &= left - 1) make_runnable(lane(warp, __builtin_ctz(left)));
}

void Executor::advance_clock(void (RaceClock::*step)()) {
    if (race_clock.at_limit()) {
        race_clock.restart();
        stream_order.restart(race_clock.now());
        for (unsigned thread = 0; thread < MAX_THREADS; thread++) fibers_[thread].label = make_label(race_clock.now(), thread);
        if (config().checks) forget_labels();
    }
    (race_clock.*step)();
}

unsigned Executor::live_lanes() const {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < 32 && running_fiber->warp() * 32 + lane < threads_; lane++) {
        if (fibers_[running_fiber->warp() * 32 + lane].state != State::EXITED) lanes |= 1u << lane;
    }
    return lanes;
}

void Executor::fail(CUresult code, const char* kind, const std::string& details, const Fiber& at) {
    record(code, kind, details, at);
    switch_to(nullptr);
    __builtin_unreachable();
}

void Executor::record(CUresult code, const char* kind, const std::string& details, const Fiber& at) {
    fault_.code = code;
    fault_.text = format("%s: kernel %s, block %s, %s, ", kind, launch_->function->name.c_str(), block_text(block_).c_str(),
                         thread_text(at.thread).c_str());
    if (at.state != State::RUNNABLE) fault_.text += state_text(at) + ", ";
    fault_.text += details;
}

// No thread can continue: the error names the first waiting thread and one that it waits for.
void Executor::report_stall() {
    const Fiber* waiting = &fibers_[0];
    while (waiting->state == State::EXITED) waiting++;
    bool barrier = waiting->state == State::AT_BARRIER;
    for (unsigned thread = 0; thread < threads_; thread++) {
        const Fiber& other = fibers_[thread];
        bool named = barrier || (other.warp() == waiting->warp() && (waiting->mask >> other.lane() & 1u) != 0);
        bool same = other.state == waiting->state &&
                    (barrier ? same_barrier(other, *waiting)
                             : same_site(other.site, waiting->site) && other.operation == waiting->operation && other.mask == waiting->mask);
        if (!named || same) continue;
        record(CUDA_ERROR_LAUNCH_FAILED, barrier ? "divergent barrier" : "divergent warp operation",
               format("while %s %s", thread_text(thread).c_str(), state_text(other).c_str()), *waiting);
        return;
    }
    record(CUDA_ERROR_LAUNCH_FAILED, "divergent warp operation",
           format("its mask %08x names lanes that the block does not have", waiting->mask), *waiting);
}

std::string Executor::state_text(const Fiber& fiber) const {
    switch (fiber.state) {
        case State::RUNNABLE: return "runs";
        case State::EXITED: return "has exited";
        case State::AT_BARRIER: {
            std::string name = fiber.barrier == 0 ? "__syncthreads" : format("barrier %u", fiber.barrier);
            return format("waits at %s in %s:%u", name.c_str(), fiber.site.file, fiber.site.line);
        }
        case State::AT_WARP_OPERATION: break;
    }
    return format("waits at %s with mask %08x in %s:%u", operation_name(fiber.operation), fiber.mask, fiber.site.file, fiber.site.line);
}

std::string Executor::block_text(unsigned block) const {
    return format("(%u, %u, %u)", block % launch_->grid[0], block / launch_->grid[0] % launch_->grid[1],
                  block / launch_->grid[0] / launch_->grid[1]);
}

std::string Executor::thread_text(unsigned thread) const {
    const unsigned* index = fibers_[thread].index;
    return format("thread (%u, %u, %u)", index[0], index[1], index[2]);
}

}  // namespace hearth
