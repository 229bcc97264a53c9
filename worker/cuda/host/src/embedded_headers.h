// The headers of ../include, embedded in the compiler library.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace hearth {

// Name and text.
using SourceFile = std::pair<std::string, std::string>;

const std::vector<SourceFile>& embedded_headers();

}  // namespace hearth
