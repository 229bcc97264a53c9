// Number formats that C++ has no type for.
#pragma once

namespace hearth {

// The 256 codes of e4m3 as floats; the two NaN codes are NaN.
extern const float (&e4m3_values)[256];

}  // namespace hearth
