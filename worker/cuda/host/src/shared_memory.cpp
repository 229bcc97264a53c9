#include "shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "config.h"
#include "hearth_host_abi.h"
#include "module.h"

namespace hearth {
namespace {

constexpr size_t MAX_DYNAMIC_BYTES = 256 * 1024;    // more than any device has

}  // namespace

SharedMemory& shared_memory = *new SharedMemory;

SharedMemory::SharedMemory() {
    void* memory = mmap(nullptr, MAX_DYNAMIC_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    dynamic_.base = static_cast<char*>(memory);
}

void SharedMemory::begin_launch(const Function& function, unsigned dynamic_bytes) {
    module_ = function.module;
    dynamic_.bytes = dynamic_bytes;
    arrays_ = module_->shared_space;
    if (!config().checks || dynamic_shadow_ != nullptr) return;
    dynamic_shadow_ = std::make_unique<Shadow>(MAX_DYNAMIC_BYTES);
    dynamic_.shadow = dynamic_shadow_.get();
}

void SharedMemory::begin_block() {
    if (config().checks) {
        dynamic_.shadow->set_written_range(0, dynamic_.bytes, false);
        if (arrays_.bytes != 0) arrays_.shadow->set_written_range(0, arrays_.bytes, false);
        return;
    }
    memset(dynamic_.base, 0xff, dynamic_.bytes);
    for (const SharedArray& array : module_->shared) memset(array.address, 0xff, array.bytes);
}

bool SharedMemory::in_array(const void* address, size_t bytes) const {
    const char* first = static_cast<const char*>(address);
    auto after = std::upper_bound(module_->shared.begin(), module_->shared.end(), first,
                                  [](const char* a, const SharedArray& array) { return a < array.address; });
    return after != module_->shared.begin() && first + bytes <= std::prev(after)->address + std::prev(after)->bytes;
}

}  // namespace hearth

void* hearth_host_dynamic_shared() { return hearth::shared_memory.dynamic().base; }
