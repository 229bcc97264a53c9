// The options of nvrtcCompileProgram.
#pragma once

#include <string>
#include <vector>

namespace hearth {

struct Options {
    unsigned capability = 52;               // NVRTC's own default
    bool real = false;                      // sm_XX, which has a CUBIN; compute_XX has none
    bool specific = false;                  // an architecture with a suffix, as sm_90a
    std::vector<std::string> compiler;      // as g++ takes them
};

extern const std::vector<int> ARCHITECTURES;

// False for an option or architecture that NVRTC 12.8 does not know; `log` says which.
bool parse_options(const std::vector<std::string>& arguments, Options& options, std::string& log);

}  // namespace hearth
