// Compiled with ../include as the working directory, where the assembler finds the files.
#include "embedded_headers.h"

#define EMBED(symbol, file)                                                                              \
    asm(".section .rodata\n.hidden " #symbol "\n.globl " #symbol "\n" #symbol ":\n.incbin \"" file "\"\n.byte 0\n.text\n"); \
    extern "C" const char symbol[];

EMBED(embedded_main, "hearth_host.h")
EMBED(embedded_abi, "hearth_host_abi.h")
EMBED(embedded_atomic, "hearth_host_atomic.h")
EMBED(embedded_launch, "hearth_host_launch.h")
EMBED(embedded_math, "hearth_host_math.h")
EMBED(embedded_ptx, "hearth_host_ptx.h")
EMBED(embedded_types, "hearth_host_types.h")
EMBED(embedded_warp, "hearth_host_warp.h")
EMBED(embedded_wgmma, "hearth_host_wgmma.h")

namespace hearth {

const std::vector<SourceFile>& embedded_headers() {
    static const std::vector<SourceFile> files = {
        {"hearth_host.h", embedded_main},         {"hearth_host_abi.h", embedded_abi},
        {"hearth_host_atomic.h", embedded_atomic}, {"hearth_host_launch.h", embedded_launch},
        {"hearth_host_math.h", embedded_math},     {"hearth_host_ptx.h", embedded_ptx},
        {"hearth_host_types.h", embedded_types},   {"hearth_host_warp.h", embedded_warp},
        {"hearth_host_wgmma.h", embedded_wgmma},
    };
    return files;
}

}  // namespace hearth
