#include "stream.h"

#include "config.h"
#include "device.h"

namespace hearth {
namespace {

// Streams of all devices are numbered together.
unsigned next_number() {
    static unsigned last = 0;
    return last++;
}

// In the order of their creation, which is the same in every run.
bool by_number(const Stream* a, const Stream* b) { return a->number < b->number; }

}  // namespace

Streams::Streams(Device& device)
    : device_(device), null_(new Stream{next_number(), true}), others_(by_number), random_(config().seed * 2 + 1) {}

Streams::~Streams() {
    for (Stream* stream : others_) delete stream;
}

Stream* Streams::find(CUstream handle) {
    if ((uintptr_t)handle <= 2) return null_.get();
    for (Stream* stream : others_) {
        if (stream == handle) return stream;
    }
    return nullptr;
}

Stream* Streams::create(bool blocking) {
    Stream* stream = new Stream{next_number(), blocking};
    others_.insert(stream);
    return stream;
}

void Streams::destroy(Stream* stream) {
    drain(stream);
    others_.erase(stream);
    delete stream;
}

CUresult Streams::add(Stream* stream, Work work) {
    if (stream == null_.get()) {
        drain_blocking();
    } else if (stream->blocking) {
        drain(null_.get());
        join(stream->before, null_->before);
    }
    if (device_.error == CUDA_SUCCESS) stream->items.push_back({std::move(work), host_});
    disturb();
    return device_.error;
}

CUresult Streams::record(Stream* stream, EventHandle& event) {
    auto record = std::make_shared<Record>();
    record->stream = stream;
    event.last = record;
    return add(stream, [record, stream]() -> Fault {
        record->reached = true;
        record->before = stream->before;
        record->when = std::chrono::steady_clock::now();
        return {};
    });
}

CUresult Streams::wait(Stream* stream, const EventHandle& event) {
    if (event.last == nullptr) return device_.error;
    return add(stream, [this, stream, record = event.last]() -> Fault {
        reach(*record);
        join(stream->before, record->before);
        return {};
    });
}

bool Streams::step(Stream* stream) {
    if (device_.error != CUDA_SUCCESS) stream->items.clear();
    if (stream->items.empty()) return false;
    Stream::Item item = std::move(stream->items.front());
    stream->items.pop_front();
    join(stream->before, *item.host);
    if (stream->before.size() <= stream->number) stream->before.resize(stream->number + 1);
    stream->before[stream->number] = ++stream->place;
    stream_order.arrive({stream->number, stream->place, stream->before});
    stream->runs = true;
    Fault fault = item.work();
    stream->runs = false;
    if (fault) {
        device_.error = fault.code;
        report(fault);
    }
    return true;
}

void Streams::disturb() {
    if (!config().shuffled || disturbs_) return;
    auto random = [this](size_t count) {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        return (size_t)(random_ >> 32) % count;
    };
    disturbs_ = true;
    for (Stream* stream : others_) {
        if (stream->runs || random(3) != 0) continue;
        for (size_t left = random(4); left > 0; left--) step(stream);
    }
    disturbs_ = false;
}

void Streams::drain(Stream* stream) {
    while (step(stream)) disturb();
}

void Streams::drain_blocking() {
    drain(null_.get());
    for (Stream* stream : others_) {
        if (!stream->blocking) continue;
        drain(stream);
        join(null_->before, stream->before);
    }
}

CUresult Streams::drain_all() {
    drain(null_.get());
    for (Stream* stream : others_) drain(stream);
    return device_.error;
}

void Streams::reach(const Record& record) {
    while (!record.reached && step(record.stream)) disturb();
}

void Streams::know(const Clock& clock) {
    Clock all = *host_;
    join(all, clock);
    if (all != *host_) host_ = std::make_shared<const Clock>(std::move(all));
}

CUresult Streams::run_now(const Work& work) {
    drain_blocking();
    if (device_.error != CUDA_SUCCESS) return device_.error;
    CUresult result = CUDA_SUCCESS;
    null_->items.push_back({[&]() -> Fault {
        Fault fault = work();
        if (fault) report(fault);
        result = fault.code;
        return {};
    }, host_});
    step(null_.get());
    know(null_->before);
    return result;
}

CUresult Streams::synchronize(Stream* stream) {
    if (stream == null_.get()) {
        drain_blocking();
    } else {
        drain(stream);
    }
    know(stream->before);
    return device_.error;
}

CUresult Streams::synchronize_all() {
    drain_all();
    know(null_->before);
    for (Stream* stream : others_) know(stream->before);
    return device_.error;
}

CUresult Streams::synchronize(const Record& record) {
    reach(record);
    know(record.before);
    return device_.error;
}

bool Streams::query(Stream* stream) {
    bool idle = !step(stream);
    if (idle) know(stream->before);
    return idle;
}

bool Streams::query(const Record& record) {
    bool reached = record.reached;
    if (reached) {
        know(record.before);
    } else {
        step(record.stream);
    }
    return reached;
}

}  // namespace hearth
