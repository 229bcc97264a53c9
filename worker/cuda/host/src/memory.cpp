#include "memory.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fault.h"

namespace hearth {
namespace {

constexpr size_t POISON_BYTES = 1 << 20;

char* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("host model: no addresses for device memory");
        abort();
    }
    return static_cast<char*>(memory);
}

// Freed bytes become NaN in every float format. Whole pages of a large range are returned to the system instead and
// read as zeros; a granule is shorter than a page, so the pages at its ends may also belong to a neighbour.
void spoil(char* address, size_t bytes) {
    static const uintptr_t page = sysconf(_SC_PAGESIZE);
    auto begin = (uintptr_t)address, end = begin + bytes;
    uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (bytes <= POISON_BYTES || madvise((void*)first, last - first, MADV_DONTNEED) != 0) {
        memset(address, 0xff, bytes);
        return;
    }
    memset(address, 0xff, first - begin);
    memset((void*)last, 0xff, end - last);
}

size_t round_up(size_t bytes) { return (bytes + DeviceMemory::GRANULE - 1) / DeviceMemory::GRANULE * DeviceMemory::GRANULE; }

// The operating system does the copy, since for an invalid address it returns an error instead of raising a signal. It
// moves less than 2 GiB at a time. If a sandbox forbids the call, a plain copy is used.
template <class Copy>
bool copy_guarded(void* local, const void* remote, size_t bytes, Copy copy) {
    constexpr size_t STEP = 1 << 30;
    for (size_t done = 0; done < bytes; done += STEP) {
        size_t step = std::min(STEP, bytes - done);
        iovec near = {(char*)local + done, step}, far = {(char*)remote + done, step};
        ssize_t copied = copy(getpid(), &near, 1, &far, 1, 0);
        if (copied == (ssize_t)step) continue;
        if (copied >= 0 || errno == EFAULT) return false;
        bool reads = copy == process_vm_readv;
        memcpy(reads ? near.iov_base : far.iov_base, reads ? far.iov_base : near.iov_base, step);
    }
    return true;
}

}  // namespace

DeviceMemory::DeviceMemory(size_t budget_bytes)
    : budget_bytes_(budget_bytes),
      reserved_bytes_(round_up(budget_bytes) * 2 + (64 << 20)),
      base_(reserve(reserved_bytes_)),
      ends_(reinterpret_cast<uint64_t*>(reserve(reserved_bytes_ / GRANULE * sizeof(uint64_t)))) {}

char* DeviceMemory::find_gap(size_t bytes) {
    for (int pass = 0; pass < 2; pass++) {
        size_t offset = cursor_;
        for (auto next = live_.lower_bound(offset); next != live_.end(); ++next) {
            if (next->first - offset >= bytes) break;
            offset = next->first + round_up(next->second) + GRANULE;
        }
        if (offset + bytes <= reserved_bytes_) return base_ + offset;
        cursor_ = 0;
    }
    return nullptr;
}

char* DeviceMemory::allocate(size_t bytes) {
    size_t whole = round_up(bytes);
    if (whole > budget_bytes_ - used_bytes_) return nullptr;
    char* address = find_gap(whole + GRANULE);
    if (address == nullptr) return nullptr;
    size_t offset = address - base_;
    cursor_ = offset + whole + GRANULE;
    used_bytes_ += whole;
    live_[offset] = bytes;
    for (auto old = freed_.lower_bound(offset); old != freed_.end() && old->first < cursor_;) old = freed_.erase(old);
    std::fill_n(ends_ + offset / GRANULE, whole / GRANULE, offset + bytes);
    return address;
}

bool DeviceMemory::free(char* address) {
    size_t offset = address - base_;
    auto found = live_.find(offset);
    if (found == live_.end()) return false;
    size_t bytes = found->second, whole = round_up(bytes);
    spoil(address, bytes);
    std::fill_n(ends_ + offset / GRANULE, whole / GRANULE, 0);
    live_.erase(found);
    freed_[offset] = bytes;
    used_bytes_ -= whole;
    return true;
}

size_t DeviceMemory::size(const char* address) const {
    auto found = live_.find(address - base_);
    return found != live_.end() ? found->second : 0;
}

std::string DeviceMemory::describe(const void* address) const {
    size_t offset = (const char*)address - base_;
    auto within = [&](const std::map<size_t, size_t>& ranges) {
        auto next = ranges.upper_bound(offset);
        if (next == ranges.begin()) return ranges.end();
        --next;
        return offset < next->first + next->second ? next : ranges.end();
    };
    if (auto freed = within(freed_); freed != freed_.end()) {
        return format("%zu bytes into a freed allocation of %zu bytes", offset - freed->first, freed->second);
    }
    if (auto live = within(live_); live != live_.end()) {
        return format("%zu bytes into an allocation of %zu bytes", offset - live->first, live->second);
    }
    auto after = live_.upper_bound(offset);
    size_t to_next = after != live_.end() ? after->first - offset : SIZE_MAX;
    if (after != live_.begin()) {
        auto before = std::prev(after);
        size_t past = offset - (before->first + before->second);
        if (past <= to_next) return format("%zu bytes past the end of an allocation of %zu bytes", past, before->second);
    }
    if (after == live_.end()) return "with no allocation on the device";
    return format("%zu bytes before an allocation of %zu bytes", to_next, after->second);
}

void* HostMemory::allocate(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    ranges_[(uintptr_t)memory] = {bytes, false, false, next_id_++};
    return memory;
}

bool HostMemory::free(void* address) {
    auto found = ranges_.find((uintptr_t)address);
    if (found == ranges_.end() || found->second.registered) return false;
    munmap(address, found->second.bytes);
    ranges_.erase(found);
    return true;
}

CUresult HostMemory::add(void* address, size_t bytes, bool read_only) {
    uintptr_t begin = (uintptr_t)address;
    auto next = ranges_.lower_bound(begin);
    bool overlaps = next != ranges_.end() && next->first < begin + bytes;
    if (next != ranges_.begin()) {
        auto before = std::prev(next);
        overlaps |= before->first + before->second.bytes > begin;
    }
    if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    ranges_[begin] = {bytes, true, read_only, next_id_++};
    return CUDA_SUCCESS;
}

CUresult HostMemory::remove(void* address) {
    auto found = ranges_.find((uintptr_t)address);
    if (found == ranges_.end() || !found->second.registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    ranges_.erase(found);
    return CUDA_SUCCESS;
}

const HostRange* HostMemory::find(const void* address, size_t bytes) const {
    auto next = ranges_.upper_bound((uintptr_t)address);
    if (next == ranges_.begin()) return nullptr;
    --next;
    return (uintptr_t)address + bytes <= next->first + next->second.bytes ? &next->second : nullptr;
}

HostMemory& host_memory() {
    static auto& memory = *new HostMemory;
    return memory;
}

bool read_host(void* to, const void* from, size_t bytes) { return copy_guarded(to, from, bytes, process_vm_readv); }

bool write_host(void* to, const void* from, size_t bytes) {
    return copy_guarded(const_cast<void*>(from), to, bytes, process_vm_writev);
}

}  // namespace hearth
