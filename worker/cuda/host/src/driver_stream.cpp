// The driver API: streams and events.
#include "device.h"

using namespace hearth;

HEARTH_API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = entry->streams.create(flags != CU_STREAM_NON_BLOCKING);
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

HEARTH_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuStreamDestroy_v2(CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr || stream != handle) return CUDA_ERROR_INVALID_HANDLE;
    entry->streams.destroy(stream);
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuStreamSynchronize(CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream != handle) return entry->streams.drain_blocking();
    return entry->streams.drain(stream);
}

// Each query does one piece of work, so that a polling caller makes progress.
HEARTH_API CUresult cuStreamQuery(CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    bool busy = entry->streams.step(stream);
    if (entry->error != CUDA_SUCCESS) return entry->error;
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventCreate(CUevent* event, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    *event = new EventHandle{std::make_shared<Event>()};
    (*event)->event->timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventDestroy_v2(CUevent event) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    delete event;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(stream_handle);
    if (stream == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Event> event = handle->event;
    uint64_t record = ++event->recorded;
    event->stream = stream;
    return entry->streams.add(stream, [event, record]() -> Fault {
        event->completed = record;
        event->when = std::chrono::steady_clock::now();
        return {};
    });
}

HEARTH_API CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(stream_handle);
    if (stream == nullptr || handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Event> event = handle->event;
    uint64_t record = event->recorded;
    Device* device = &*entry;
    return device->streams.add(stream, [device, event, record]() -> Fault {
        device->streams.reach(*event, record);
        return {};
    });
}

HEARTH_API CUresult cuEventSynchronize(CUevent handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return entry->streams.reach(*handle->event, handle->event->recorded);
}

HEARTH_API CUresult cuEventQuery(CUevent handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Event& event = *handle->event;
    if (event.completed == event.recorded) return CUDA_SUCCESS;
    entry->streams.step(event.stream);
    return entry->error != CUDA_SUCCESS ? entry->error : CUDA_ERROR_NOT_READY;
}

HEARTH_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (start == nullptr || end == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Event &first = *start->event, &last = *end->event;
    if (!first.timed || !last.timed || first.recorded == 0 || last.recorded == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (first.completed != first.recorded || last.completed != last.recorded) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last.when - first.when).count();
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
