// Compiles a kernel file with g++ into an image that the driver library loads.
#pragma once

#include <string>
#include <vector>

#include "embedded_headers.h"
#include "options.h"

namespace hearth {

struct Program {
    std::string name;
    std::string source;
    std::vector<SourceFile> headers;
};

// Returns false, with the compiler's messages in `log`, if the source does not compile.
bool compile(const Program& program, const Options& options, bool checks, std::string& image, std::string& log);

}  // namespace hearth
