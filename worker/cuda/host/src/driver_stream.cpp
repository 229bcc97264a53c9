// The driver API: streams and events.
#include "config.h"
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
    return entry->streams.synchronize(stream);
}

// Each query does one piece of work, so that a polling caller makes progress.
HEARTH_API CUresult cuStreamQuery(CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    bool idle = entry->streams.query(stream);
    if (entry->error != CUDA_SUCCESS) return entry->error;
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

HEARTH_API CUresult cuEventCreate(CUevent* event, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    *event = new EventHandle;
    (*event)->timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventDestroy_v2(CUevent event) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    delete event;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventRecord(CUevent event, CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return entry->streams.record(stream, *event);
}

// Whether the next wait of a stream is the one that a test leaves out.
static bool skips_wait() {
    static uint64_t waits = 0;
    return ++waits == config().skipped_wait;
}

HEARTH_API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return skips_wait() ? CUDA_SUCCESS : entry->streams.wait(stream, *event);
}

HEARTH_API CUresult cuEventSynchronize(CUevent event) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return event->last != nullptr ? entry->streams.synchronize(*event->last) : CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventQuery(CUevent event) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (event->last == nullptr || entry->streams.query(*event->last)) return CUDA_SUCCESS;
    return entry->error != CUDA_SUCCESS ? entry->error : CUDA_ERROR_NOT_READY;
}

HEARTH_API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (start == nullptr || end == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->timed || !end->timed || start->last == nullptr || end->last == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const Record &first = *start->last, &last = *end->last;
    if (!first.reached || !last.reached) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last.when - first.when).count();
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
