#include "race_clock.h"

#include <algorithm>

namespace hearth {

RaceClock& race_clock = *new RaceClock;

void RaceClock::begin_launch() {
    launch_floor_ = make_label(++now_, 0);
    block_starts_.clear();
    first_block_ = 0;
}

void RaceClock::begin_block() {
    block_ = ++now_;
    barrier_floor_ = make_label(now_, 0);
    block_starts_.push_back(now_);
}

void RaceClock::barrier() { barrier_floor_ = make_label(++now_, 0); }

// Forgets earlier accesses: a race with one is missed, but none is reported wrongly.
void RaceClock::restart() {
    now_ = block_ = 1;
    launch_floor_ = barrier_floor_ = make_label(1, 0);
    first_block_ += (int)block_starts_.size() - 1;
    block_starts_.assign(1, 1);
}

int RaceClock::block_at(uint32_t time) const {
    auto after = std::upper_bound(block_starts_.begin(), block_starts_.end(), time);
    return after == block_starts_.begin() ? -1 : first_block_ + (int)(after - block_starts_.begin()) - 1;
}

}  // namespace hearth
