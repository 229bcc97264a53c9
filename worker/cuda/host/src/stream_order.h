// What comes before what among the operations of all streams: vector clocks, which events and synchronisation join.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shadow.h"

namespace hearth {

// For each stream, by number: how many of its operations come before.
using Clock = std::vector<uint64_t>;

void join(Clock& clock, const Clock& other);

// A place in the order of a stream, with all that comes before it, itself included.
struct Moment {
    unsigned stream = 0;
    uint64_t place = 0;
    Clock before;
};

// Operations by the time at which they ran, which is what labels of memory hold.
class StreamOrder {
public:
    // The place of the operation that runs next.
    void arrive(const Moment& moment) { moment_ = moment, running_++; }
    // Begins that operation at a new time.
    void begin(uint32_t time, const std::string& name);
    // Forgets all operations but the running one, which counts as begun at `time`.
    void restart(uint32_t time);

    // Labels below this belong to operations that come before the running one.
    Label settled_floor() const { return settled_floor_; }
    // Whether the operation that ran at `time` comes before the running one, or is it.
    bool is_before(uint32_t time) const;
    // Whether an access with this label comes before the running operation, or belongs to it.
    bool is_before(Label label) const { return label < settled_floor_ || is_before(label_time(label)); }
    // "kernel add in stream 2".
    std::string describe(Label label) const;

private:
    struct Operation {
        uint32_t begin;
        unsigned stream;
        uint64_t place;
        const std::string* name;
    };
    struct Begun {
        uint64_t place;
        uint32_t begin;
    };

    // What is_before said while the operation of this number ran: neighbouring accesses ask for the same few times.
    struct Answer {
        uint32_t time;
        uint64_t running;
        bool is_before;
    };
    static constexpr uint32_t ANSWERS = 1024;

    void add(const Operation& operation);
    const Operation* find(uint32_t time) const;
    bool look_up(uint32_t time) const;

    Moment moment_;
    std::vector<Operation> operations_;                 // by time
    std::map<unsigned, std::vector<Begun>> streams_;    // by place
    std::set<std::string> names_;
    uint64_t running_ = 1;                              // number of the running operation
    mutable Answer answers_[ANSWERS] = {};
    Label settled_floor_ = make_label(1, 0);
};

extern StreamOrder& stream_order;

}  // namespace hearth
