#include "async_copy.h"

#include <cstring>

#include "access.h"
#include "config.h"

namespace hearth {
namespace {

void check_source(const Fiber& fiber, const AsyncCopy& copy) {
    if (copy.valid) check_global_access({Use::READ, copy.global, copy.bytes, copy.bytes, fiber, {nullptr, &copy.site}});
}

// The source is checked again: another thread may have written to it in the meantime.
void land(Fiber& fiber, const AsyncCopy& copy) {
    if (config().checks) {
        check_source(fiber, copy);
        mark_landed(fiber, copy.shared, copy.bytes);
    }
    if (copy.valid) {
        memcpy(copy.shared, copy.global, copy.bytes);
    } else {
        memset(copy.shared, 0, copy.bytes);
    }
    fiber.copies_unfenced = true;
}

}  // namespace

void abandon_copies(Fiber& fiber) {
    if (config().checks) {
        for (const AsyncCopy& copy : fiber.copies) mark_abandoned(copy.shared, copy.bytes);
    }
    fiber.copies.clear();
    fiber.group_ends.clear();
}

}  // namespace hearth

using namespace hearth;

void hearth_host_cp_async(HearthHostSite site, int bytes, void* shared, const void* global, int valid) {
    Fiber& self = *running_fiber;
    AsyncCopy copy = {static_cast<char*>(shared), static_cast<const char*>(global), (unsigned)bytes, valid != 0, site};
    if (config().checks) {
        check_source(self, copy);
        check_shared_access({Use::ASYNC_WRITE, copy.shared, copy.bytes, copy.bytes, self, {nullptr, &copy.site}});
    }
    self.copies.push_back(copy);
}

void hearth_host_cp_async_commit() { running_fiber->group_ends.push_back(running_fiber->copies.size()); }

void hearth_host_cp_async_wait(int groups) {
    Fiber& self = *running_fiber;
    if (self.group_ends.size() <= (size_t)groups) return;
    size_t finished = self.group_ends.size() - groups, count = self.group_ends[finished - 1];
    for (size_t i = 0; i < count; i++) land(self, self.copies[i]);
    self.copies.erase(self.copies.begin(), self.copies.begin() + count);
    self.group_ends.erase(self.group_ends.begin(), self.group_ends.begin() + finished);
    for (size_t& end : self.group_ends) end -= count;
}
