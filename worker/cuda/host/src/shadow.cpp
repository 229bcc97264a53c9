#include "shadow.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hearth {
namespace {

// Zeros that occupy memory only where they are written.
void* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("host model: no addresses for the shadow of memory");
        abort();
    }
    return memory;
}

size_t bitmap_bytes(size_t bytes) { return bytes / 8 + 8; }

size_t label_bytes(size_t bytes) { return (bytes + 15) / 16 * 32 * sizeof(Label); }

}  // namespace

Shadow::Shadow(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    written_ = static_cast<uint8_t*>(reserve(bitmap_bytes(bytes)));
    labels_ = static_cast<Label*>(reserve(label_bytes(bytes)));
}

Shadow::~Shadow() {
    if (bytes_ == 0) return;
    munmap(written_, bitmap_bytes(bytes_));
    munmap(labels_, label_bytes(bytes_));
}

void Shadow::set_written_range(size_t offset, size_t bytes, bool written) {
    if (bytes_ == 0) return;
    auto set = [&](size_t at) {
        uint8_t bit = 1u << (at % 8);
        written_[at / 8] = written ? written_[at / 8] | bit : written_[at / 8] & ~bit;
    };
    size_t end = offset + bytes;
    for (; offset < end && offset % 8 != 0; offset++) set(offset);
    if (offset < end) memset(written_ + offset / 8, written ? 0xff : 0, (end - offset) / 8);
    for (offset = offset + (end - offset) / 8 * 8; offset < end; offset++) set(offset);
}

void Shadow::copy_written_range(size_t to, size_t from, size_t bytes) {
    if (bytes_ == 0) return;
    bool aligned = to % 8 == 0 && from % 8 == 0;
    size_t whole = aligned ? bytes / 8 : 0;
    memmove(written_ + to / 8, written_ + from / 8, whole);
    for (size_t i = whole * 8; i < bytes; i++) set_written_range(to + i, 1, written(from + i, 1));
}

void Shadow::forget_range(size_t offset, size_t bytes) {
    if (bytes_ == 0) return;
    set_written_range(offset, bytes, false);
    static const uintptr_t page = sysconf(_SC_PAGESIZE);
    // Allocations begin and end at multiples of 16.
    auto begin = (uintptr_t)writes(offset), end = begin + label_bytes(bytes);
    // Whole pages are given back, so that labels of memory that nobody touched take none.
    uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (first >= last || madvise((void*)first, last - first, MADV_DONTNEED) != 0) {
        memset((void*)begin, 0, end - begin);
        return;
    }
    memset((void*)begin, 0, first - begin);
    memset((void*)last, 0, end - last);
}

void Shadow::forget_labels() {
    if (bytes_ == 0) return;
    madvise(labels_, label_bytes(bytes_), MADV_DONTNEED);
}

}  // namespace hearth
