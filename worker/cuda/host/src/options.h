// The options of nvrtcCompileProgram.
#pragma once

#include <string>
#include <vector>

namespace hearth {

struct Options {
    unsigned capability = 52;               // NVRTC's own default
    bool real = false;                      // sm_XX, which has a CUBIN; compute_XX does not
    bool specific = false;                  // an architecture with a suffix, such as sm_90a
    std::vector<std::string> compiler;      // options for g++
};

extern const std::vector<int> ARCHITECTURES;

// Returns false, with the reason in `log`, for an option or architecture that NVRTC 12.8 does not know.
bool parse_options(const std::vector<std::string>& arguments, Options& options, std::string& log);

}  // namespace hearth
