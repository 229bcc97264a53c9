// The checks' state for a range of memory: for each byte whether it was ever written, and who wrote and read it last.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hearth {

// Time << 12 | who, so that labels compare as times; never negative, because the vector units have signed comparisons.
using Label = int32_t;

constexpr unsigned WHO_BITS = 12;
constexpr uint32_t MAX_TIME = (1u << (31 - WHO_BITS)) - 1;

// "Who" is a thread of a block or one of these.
constexpr unsigned WARP_SET = 1024;        // + warp: several threads of the warp
constexpr unsigned BLOCK_SET = 1056;       // several warps of the block
constexpr unsigned GRID_SET = 1057;        // threads of several blocks
constexpr unsigned ATOMIC = 2048;          // added to one of these in a label of writes: by atomic operations
constexpr unsigned PENDING = 4095;         // a cp.async that has not landed

constexpr Label make_label(uint32_t time, unsigned who) { return (Label)(time << WHO_BITS | who); }
constexpr uint32_t label_time(Label label) { return (uint32_t)label >> WHO_BITS; }
constexpr unsigned label_who(Label label) { return (uint32_t)label & ((1u << WHO_BITS) - 1); }
constexpr Label PENDING_LABEL = make_label(MAX_TIME, PENDING);

class Shadow {
public:
    explicit Shadow(size_t bytes);
    ~Shadow();
    Shadow(const Shadow&) = delete;
    Shadow& operator=(const Shadow&) = delete;

    // The labels of the bytes from `offset` to the next multiple of 16, which are adjacent.
    Label* writes(size_t offset) { return labels_ + offset / 16 * 32 + offset % 16; }
    Label* reads(size_t offset) { return writes(offset) + 16; }

    // `bytes` is 1, 2, 4, 8 or 16 and divides `offset`.
    bool written(size_t offset, unsigned bytes) const {
        if (bytes == 16) return written_[offset / 8] == 0xff && written_[offset / 8 + 1] == 0xff;
        unsigned mask = ((1u << bytes) - 1) << (offset % 8);
        return (written_[offset / 8] & mask) == mask;
    }
    void set_written(size_t offset, unsigned bytes) {
        if (bytes == 16) {
            written_[offset / 8] = written_[offset / 8 + 1] = 0xff;
        } else {
            written_[offset / 8] |= (uint8_t)(((1u << bytes) - 1) << (offset % 8));
        }
    }

    // Any range. A shadow of zero bytes ignores it.
    void set_written_range(size_t offset, size_t bytes, bool written);
    void copy_written_range(size_t to, size_t from, size_t bytes);
    // An allocation is gone: its bytes count as unwritten, and who used them no longer matters.
    void forget_range(size_t offset, size_t bytes);
    // Labels restart when the clock does.
    void forget_labels();

private:
    size_t bytes_;
    uint8_t* written_ = nullptr;    // one bit per byte
    Label* labels_ = nullptr;       // per 16 bytes: 16 of writes, then 16 of reads, so that a check stays on one page
};

}  // namespace hearth
