// Streams and events. Work waits in its stream until something synchronises with it, so that a host buffer that is
// changed or freed too early is detected.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>

#include "fault.h"

namespace hearth {

struct Device;
struct Stream;

struct Event {
    Stream* stream = nullptr;      // of the last record
    uint64_t recorded = 0;         // records so far
    uint64_t completed = 0;        // the latest record that the stream has reached
    bool timed = true;
    std::chrono::steady_clock::time_point when;
};

// Target of a CUevent: waiting work may outlive the handle.
struct EventHandle {
    std::shared_ptr<Event> event;
};

using Work = std::function<Fault()>;

struct Stream {
    Device* device;
    bool blocking;     // orders itself with the null stream
    std::deque<Work> work;
};

// The streams of a device; every function returns the device's sticky error, if one is set by then.
class Streams {
public:
    explicit Streams(Device& device);
    ~Streams();

    // The stream for a handle: 0 and the two special handles are the null stream. Null for one that does not exist.
    Stream* find(CUstream handle);
    Stream* create(bool blocking);
    void destroy(Stream* stream);

    // Queues work, ordered with the null stream as documented by CUDA.
    CUresult add(Stream* stream, Work work);
    CUresult drain(Stream* stream);
    CUresult drain_all();
    // Drains the streams that the null stream waits for.
    CUresult drain_blocking();
    // Does one piece of work; returns false if there was none.
    bool step(Stream* stream);
    // Runs the event's stream up to the record.
    CUresult reach(const Event& event, uint64_t record);

private:
    Device& device_;
    std::unique_ptr<Stream> null_;
    std::set<Stream*> others_;
};

}  // namespace hearth
