#include "stream.h"

#include "device.h"

namespace hearth {

Streams::Streams(Device& device) : device_(device), null_(new Stream{&device, true, {}}) {}

Streams::~Streams() {
    for (Stream* stream : others_) delete stream;
}

Stream* Streams::find(CUstream handle) {
    if ((uintptr_t)handle <= 2) return null_.get();
    return others_.count(handle) != 0 ? handle : nullptr;
}

Stream* Streams::create(bool blocking) {
    Stream* stream = new Stream{&device_, blocking, {}};
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
    }
    if (device_.error == CUDA_SUCCESS) stream->work.push_back(std::move(work));
    return device_.error;
}

bool Streams::step(Stream* stream) {
    if (device_.error != CUDA_SUCCESS) stream->work.clear();
    if (stream->work.empty()) return false;
    Work work = std::move(stream->work.front());
    stream->work.pop_front();
    if (Fault fault = work()) {
        device_.error = fault.code;
        report(fault);
    }
    return true;
}

CUresult Streams::drain(Stream* stream) {
    while (step(stream)) {
    }
    return device_.error;
}

CUresult Streams::drain_blocking() {
    drain(null_.get());
    for (Stream* stream : others_) {
        if (stream->blocking) drain(stream);
    }
    return device_.error;
}

CUresult Streams::drain_all() {
    drain(null_.get());
    for (Stream* stream : others_) drain(stream);
    return device_.error;
}

CUresult Streams::reach(const Event& event, uint64_t record) {
    while (event.completed < record && step(event.stream)) {
    }
    return device_.error;
}

}  // namespace hearth
