// The error texts of accesses. README.md lists how each begins.
#include <unistd.h>

#include <cstdio>

#include "access.h"
#include "device.h"
#include "module.h"
#include "stream_order.h"

namespace hearth {
namespace {

// "attention.cu:93, " from the object's line table, innermost inlined function first; empty if it has none.
std::string source_line(const void* code) {
    const Module& module = *executor().launch().function->module;
    // A return address points past the call.
    size_t offset = (const char*)code - module.load_address - 1;
    FILE* pipe = popen(format("addr2line -s -i -e /proc/%d/fd/%d 0x%zx 2>/dev/null", getpid(), module.file, offset).c_str(), "r");
    if (pipe == nullptr) return "";
    std::string places;
    char line[256];
    while (fgets(line, sizeof line, pipe) != nullptr) {
        std::string place = line;
        place = place.substr(0, place.find_first_of(" \n"));
        if (place.find('?') != std::string::npos || place.find("hearth_host") == 0) continue;
        places += places.empty() ? place : " in " + place;
    }
    pclose(pipe);
    return places.empty() ? "" : places + ", ";
}

std::string where(const Access& access) {
    std::string line;
    if (access.place.site != nullptr) line = format("%s:%u, ", access.place.site->file, access.place.site->line);
    if (access.place.code != nullptr) line = source_line(access.place.code);
    return line + format("%zu bytes at %p", access.bytes, (const void*)access.address);
}

// "in shared array part[16] of 64 bytes", or the device's description of the address's surroundings.
std::string surroundings(const Access& access, bool is_shared) {
    Executor& e = executor();
    if (shared_memory.dynamic().contains(access.address)) {
        return format("%zu bytes into %zu bytes of dynamic shared memory", shared_memory.dynamic().offset(access.address),
                      shared_memory.dynamic().bytes);
    }
    if (is_shared) {
        for (const SharedArray& array : e.launch().function->module->shared) {
            if (access.address < array.address || access.address >= array.address + array.bytes) continue;
            return format("%zu bytes into the shared array %s of %zu bytes", (size_t)(access.address - array.address), array.name.c_str(),
                          array.bytes);
        }
    }
    return e.device().memory.describe(access.address);
}

// Distance of an address that should be shared from the shared memory before it; empty if it is nowhere near.
std::string past_shared(const Access& access) {
    constexpr size_t NEAR_BYTES = 1 << 20;
    const Space& dynamic = shared_memory.dynamic();
    size_t past = access.address - (dynamic.base + dynamic.bytes);
    if (shared_memory.dynamic().contains(access.address)) past = 0;
    if (past < NEAR_BYTES) {
        return format("%zu bytes past the end of %zu bytes of dynamic shared memory", past, dynamic.bytes);
    }
    std::string text;
    for (const SharedArray& array : executor().launch().function->module->shared) {
        if (access.address < array.address || (size_t)(access.address - array.address) > NEAR_BYTES) continue;
        text = format("%zu bytes past the end of the shared array %s of %zu bytes",
                      (size_t)(access.address - array.address - array.bytes), array.name.c_str(), array.bytes);
    }
    return text;
}

const char* verb(Use use) {
    switch (use) {
        case Use::READ: return "read";
        case Use::WRITE: return "write";
        case Use::ATOMIC: return "atomic operation";
        case Use::ASYNC_WRITE: break;
    }
    return "cp.async";
}

// Describes the thread or threads of a label.
std::string describe_label(Label label) {
    Executor& e = executor();
    unsigned who = label_who(label) & ~ATOMIC;
    int block = race_clock.block_at(label_time(label));
    std::string in_block = block < 0 ? "an earlier block" : "block " + e.block_text((unsigned)block);
    if (who == GRID_SET) return "threads of several blocks";
    if (who == BLOCK_SET) return "several warps of " + in_block;
    if (who >= WARP_SET) return format("several threads of warp %u of ", who - WARP_SET) + in_block;
    return in_block + ", " + e.thread_text(who);
}

}  // namespace

void fail_misaligned(const Access& access) {
    executor().fail(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address",
                    format("%s, a %s that needs an alignment of %u", where(access).c_str(), verb(access.use), access.alignment),
                    access.fiber);
}

void fail_out_of_bounds(const Access& access) {
    Executor& e = executor();
    std::string shared = past_shared(access);
    if (!shared.empty()) {
        e.fail(CUDA_ERROR_ILLEGAL_ADDRESS, "shared memory out of bounds",
               format("%s of %s, %s", verb(access.use), where(access).c_str(), shared.c_str()), access.fiber);
    }
    std::string what = format("%s of %s, ", verb(access.use), where(access).c_str());
    if (e.device().memory.reserved(access.address)) {
        what += e.device().memory.describe(access.address);
    } else if (host_memory().find(access.address, 1) != nullptr) {
        what += "at the end of pinned host memory, or in host memory that was registered to be read only";
    } else {
        what += "not an address of the device";
    }
    bool freed = what.find("freed allocation") != std::string::npos;
    e.fail(CUDA_ERROR_ILLEGAL_ADDRESS, freed ? "use of freed memory" : "out of bounds", what, access.fiber);
}

void fail_unwritten(const Access& access, bool is_shared) {
    executor().fail(CUDA_ERROR_LAUNCH_FAILED, is_shared ? "read of unwritten shared memory" : "read of unwritten memory",
                    format("%s, %s", where(access).c_str(), surroundings(access, is_shared).c_str()), access.fiber);
}

void fail_race(const Access& access, bool is_shared, size_t byte, Label other, bool other_wrote) {
    std::string place = format("%s of %s, %s", verb(access.use), where(access).c_str(), surroundings(access, is_shared).c_str());
    if (other == PENDING_LABEL) {
        executor().fail(CUDA_ERROR_LAUNCH_FAILED, "cp.async not waited for", place + ", where a cp.async has not landed", access.fiber);
    }
    if (!is_shared && !stream_order.is_before(other)) {
        executor().fail(CUDA_ERROR_LAUNCH_FAILED, "race between streams",
                        format("%s, whose byte %zu was %s by %s with no event between", place.c_str(), byte,
                               other_wrote ? "written" : "read", stream_order.describe(other).c_str()),
                        access.fiber);
    }
    const char* what = !other_wrote ? "read" : (label_who(other) & ATOMIC) != 0 ? "changed by an atomic operation" : "written";
    executor().fail(CUDA_ERROR_LAUNCH_FAILED, is_shared ? "shared memory race" : "global memory race",
                    format("%s, whose byte %zu was %s by %s with no barrier between", place.c_str(), byte, what,
                           describe_label(other).c_str()),
                    access.fiber);
}

}  // namespace hearth
