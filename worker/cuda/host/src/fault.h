// The first error of a launch: the driver's result and the text for the log.
#pragma once

#include <string>

#include "cuda_api.h"

namespace hearth {

struct Fault {
    CUresult code = CUDA_SUCCESS;
    std::string text;
    explicit operator bool() const { return code != CUDA_SUCCESS; }
};

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...);

// Writes the text to stderr and to the file named by HEARTH_HOST_MODEL_REPORT.
void report(const Fault& fault);

}  // namespace hearth
