// The entry points of a kernel file, found in its preprocessed text.
#pragma once

#include <string>
#include <vector>

namespace hearth {

struct EntryPoint {
    std::string name;
    std::string max_threads;     // the first argument of __launch_bounds__ as in the source, or "1024"
};

// Finds every `extern "C" __global__ void name(`, with or without launch bounds.
std::vector<EntryPoint> find_entry_points(const std::string& text);

// The functions through which the driver library reaches them, to be appended to the text.
std::string entry_point_glue(const std::vector<EntryPoint>& entries);

}  // namespace hearth
