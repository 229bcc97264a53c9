// The first error of a launch: what the driver returns and what the reader of a log needs.
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

// Writes the text to stderr and to the file of HEARTH_HOST_MODEL_REPORT.
void report(const Fault& fault);

}  // namespace hearth
