// Streams and events. Work waits in its stream until something synchronises with it, so that a host buffer that is
// changed or freed too early is detected. With a seed, streams also run some of their work at other times: in any order that
// events and synchronisation allow.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>

#include "fault.h"
#include "stream_order.h"

namespace hearth {

struct Device;
struct Stream;

// A point in a stream that an event was recorded at.
struct Record {
    Stream* stream;
    bool reached = false;
    Clock before;                  // what comes before it, once it is reached
    std::chrono::steady_clock::time_point when;
};

// Target of a CUevent. Who waits for it waits for the last record at that time.
struct EventHandle {
    std::shared_ptr<Record> last;
    bool timed = true;
};

using Work = std::function<Fault()>;

struct Stream {
    struct Item {
        Work work;
        std::shared_ptr<const Clock> host;    // what the host had waited for when it queued this
    };

    unsigned number;
    bool blocking;     // orders itself with the null stream
    std::deque<Item> items = {};
    uint64_t place = 0;
    Clock before = {};             // what comes before the next item
    bool runs = false;             // an item is being run
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
    CUresult record(Stream* stream, EventHandle& event);
    CUresult wait(Stream* stream, const EventHandle& event);
    // Does, in the null stream and at once, work that follows all that it has to wait for. Its error is of that call alone.
    CUresult run_now(const Work& work);
    // Runs all streams. The host does not count as having waited for them.
    CUresult drain_all();

    // The host waits for a stream, for those that the null stream waits for, for all, or for a record.
    CUresult synchronize(Stream* stream);
    CUresult synchronize_all();
    CUresult synchronize(const Record& record);
    // The host asks, which does one piece of work: whether there was none left.
    bool query(Stream* stream);
    bool query(const Record& record);

private:
    void drain(Stream* stream);
    void drain_blocking();
    bool step(Stream* stream);
    void reach(const Record& record);
    // With a seed, runs some work of some streams.
    void disturb();
    void know(const Clock& clock);

    Device& device_;
    std::unique_ptr<Stream> null_;
    std::set<Stream*, bool (*)(const Stream*, const Stream*)> others_;
    std::shared_ptr<const Clock> host_ = std::make_shared<const Clock>();    // what the host has waited for
    uint64_t random_;
    bool disturbs_ = false;
};

}  // namespace hearth
