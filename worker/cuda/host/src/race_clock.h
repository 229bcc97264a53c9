// Time for race detection: it advances when a block starts and when threads synchronise. An access is labelled with
// the time of the last synchronisation that its thread passed, so that "before that barrier" is a comparison.
#pragma once

#include <vector>

#include "shadow.h"

namespace hearth {

class RaceClock {
public:
    uint32_t now() const { return now_; }
    uint32_t block_start() const { return block_; }
    // Labels below these are older than the launch, or than the last barrier of the running block.
    Label launch_floor() const { return launch_floor_; }
    Label barrier_floor() const { return barrier_floor_; }

    void begin_launch();
    void begin_block();
    void barrier();
    void warp_barrier() { now_++; }
    // Whether the time must be restarted, before it no longer fits a label.
    bool at_limit() const { return now_ + 1 >= MAX_TIME; }
    void restart();
    // The block of this launch that ran at `time`, or -1 if no longer known.
    int block_at(uint32_t time) const;

private:
    uint32_t now_ = 1;
    uint32_t block_ = 1;
    Label launch_floor_ = make_label(1, 0);
    Label barrier_floor_ = make_label(1, 0);
    int first_block_ = 0;                     // block whose start is first in block_starts_
    std::vector<uint32_t> block_starts_;
};

extern RaceClock& race_clock;

}  // namespace hearth
