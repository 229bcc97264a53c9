#include "stream_order.h"

#include <algorithm>

#include "fault.h"

namespace hearth {

StreamOrder& stream_order = *new StreamOrder;

void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t stream = 0; stream < other.size(); stream++) clock[stream] = std::max(clock[stream], other[stream]);
}

void StreamOrder::begin(uint32_t time, const std::string& name) {
    running_++;
    add({time, moment_.stream, moment_.place, &*names_.insert(name).first});
    uint32_t settled = time;
    for (const auto& [stream, begun] : streams_) {
        uint64_t before = stream < moment_.before.size() ? moment_.before[stream] : 0;
        auto first = std::upper_bound(begun.begin(), begun.end(), before, [](uint64_t place, const Begun& b) { return place < b.place; });
        if (first != begun.end()) settled = std::min(settled, first->begin);
    }
    settled_floor_ = make_label(settled, 0);
}

void StreamOrder::restart(uint32_t time) {
    if (operations_.empty()) return;
    running_++;
    Operation running = operations_.back();
    operations_.clear();
    streams_.clear();
    running.begin = time;
    add(running);
    settled_floor_ = make_label(time, 0);
}

void StreamOrder::add(const Operation& operation) {
    operations_.push_back(operation);
    streams_[operation.stream].push_back({operation.place, operation.begin});
}

const StreamOrder::Operation* StreamOrder::find(uint32_t time) const {
    auto after = std::upper_bound(operations_.begin(), operations_.end(), time, [](uint32_t t, const Operation& o) { return t < o.begin; });
    return after != operations_.begin() ? &*std::prev(after) : nullptr;
}

bool StreamOrder::is_before(uint32_t time) const {
    Answer& answer = answers_[time % ANSWERS];
    if (answer.time != time || answer.running != running_) answer = {time, running_, look_up(time)};
    return answer.is_before;
}

bool StreamOrder::look_up(uint32_t time) const {
    const Operation* operation = find(time);
    if (operation == nullptr) return true;
    return operation->stream < moment_.before.size() && operation->place <= moment_.before[operation->stream];
}

std::string StreamOrder::describe(Label label) const {
    const Operation* operation = find(label_time(label));
    if (operation == nullptr) return "an earlier operation";
    return format("%s in stream %u", operation->name->c_str(), operation->stream);
}

}  // namespace hearth
