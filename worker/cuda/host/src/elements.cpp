#include "elements.h"

namespace hearth {
namespace {

struct Table {
    float values[256];
    Table() {
        for (int code = 0; code < 256; code++) {
            int exponent = code >> 3 & 15, mantissa = code & 7;
            float value = exponent == 0 ? __builtin_ldexpf(mantissa, -9) : __builtin_ldexpf(8 + mantissa, exponent - 10);
            if ((code & 0x7f) == 0x7f) value = __builtin_nanf("");
            values[code] = (code & 0x80) != 0 ? -value : value;
        }
    }
};

const Table table;

}  // namespace

const float (&e4m3_values)[256] = table.values;

}  // namespace hearth
