// The NVRTC API.
#include <cstring>
#include <string>
#include <vector>

#include "compile.h"
#include "config.h"

enum nvrtcResult {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_OUT_OF_MEMORY = 1,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_PROGRAM = 4,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

namespace {

struct CompiledProgram {
    hearth::Program program;
    std::string log;
    std::string image;     // empty until a compilation succeeds
    bool real = false;
};

// Texts are returned with their terminating zero, images without.
void copy_text(char* to, const std::string& text) { memcpy(to, text.c_str(), text.size() + 1); }

}  // namespace

using nvrtcProgram = CompiledProgram*;

#define HEARTH_API extern "C" __attribute__((visibility("default")))

HEARTH_API nvrtcResult nvrtcVersion(int* major, int* minor) {
    *major = 12;
    *minor = 8;
    return NVRTC_SUCCESS;
}

HEARTH_API const char* nvrtcGetErrorString(nvrtcResult result) {
    switch (result) {
        case NVRTC_SUCCESS: return "NVRTC_SUCCESS";
        case NVRTC_ERROR_OUT_OF_MEMORY: return "NVRTC_ERROR_OUT_OF_MEMORY";
        case NVRTC_ERROR_INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case NVRTC_ERROR_INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case NVRTC_ERROR_INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case NVRTC_ERROR_COMPILATION: return "NVRTC_ERROR_COMPILATION";
    }
    return "NVRTC_ERROR unknown";
}

HEARTH_API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    *count = (int)hearth::ARCHITECTURES.size();
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcGetSupportedArchs(int* architectures) {
    memcpy(architectures, hearth::ARCHITECTURES.data(), hearth::ARCHITECTURES.size() * sizeof(int));
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcCreateProgram(nvrtcProgram* result, const char* source, const char* name, int header_count,
                                          const char* const* headers, const char* const* header_names) {
    if (result == nullptr || source == nullptr || header_count < 0) return NVRTC_ERROR_INVALID_INPUT;
    auto* compiled = new CompiledProgram;
    compiled->program.source = source;
    std::string path = name != nullptr && *name != '\0' ? name : "default_program";
    compiled->program.name = path.substr(path.rfind('/') + 1);
    for (int i = 0; i < header_count; i++) compiled->program.headers.emplace_back(header_names[i], headers[i]);
    *result = compiled;
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
    if (program == nullptr || *program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* arguments) {
    if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    hearth::Options options;
    program->log.clear();
    program->image.clear();
    std::vector<std::string> texts(arguments, arguments + count);
    if (!hearth::parse_options(texts, options, program->log)) return NVRTC_ERROR_INVALID_OPTION;
    program->real = options.real;
    bool compiled = hearth::compile(program->program, options, hearth::checks_wanted(), program->image, program->log);
    return compiled ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

HEARTH_API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
    if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->log.size() + 1;
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
    if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    copy_text(log, program->log);
    return NVRTC_SUCCESS;
}

// Only a real architecture has a CUBIN.
HEARTH_API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) {
    if (program == nullptr) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->real ? program->image.size() : 0;
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
    if (program == nullptr || !program->real || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    memcpy(cubin, program->image.data(), program->image.size());
    return NVRTC_SUCCESS;
}

// PTX is the same image: the driver library loads it, and nothing else reads it.
HEARTH_API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
    if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    *bytes = program->image.size() + 1;
    return NVRTC_SUCCESS;
}

HEARTH_API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* ptx) {
    if (program == nullptr || program->image.empty()) return NVRTC_ERROR_INVALID_PROGRAM;
    copy_text(ptx, program->image);
    return NVRTC_SUCCESS;
}
