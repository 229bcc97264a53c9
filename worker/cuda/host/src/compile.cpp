#include "compile.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <sstream>

#include "entry_points.h"
#include "files.h"
#include "image.h"

namespace hearth {
namespace {

// Bytes after each shared array that must not be accessed, so that an index past the end does not reach the next array.
constexpr int SHARED_GAP_BYTES = 256;

std::vector<std::string> preprocess_flags(const Options& options, const std::string& name) {
    std::vector<std::string> flags = {"g++", "-E", "-x", "c++", "-nostdinc", "-I.", "-Ihearth_host", "-include", "hearth_host.h",
                                      "-DHEARTH_HOST_MODEL=1", "-D__CUDACC__=1", "-D__CUDACC_RTC__=1",
                                      "-D__CUDA_ARCH__=" + std::to_string(options.capability * 10)};
    if (options.specific) flags.push_back("-D__CUDA_ARCH_FEAT_SM" + std::to_string(options.capability) + "_ALL=1");
    flags.insert(flags.end(), options.compiler.begin(), options.compiler.end());
    flags.insert(flags.end(), {name, "-o", "expanded.cpp"});
    return flags;
}

// Each shared array needs a section of its own, for the gap after it, and must be local to this object.
std::vector<std::string> compile_flags(const Options& options, bool checks) {
    std::vector<std::string> flags = {
        "g++", "-S", "-x", "c++", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fdata-sections", "-fno-gnu-unique",
        "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
        "-fno-asynchronous-unwind-tables", "-fdiagnostics-color=never", "-Wno-attributes", "-D__global__=__attribute__((noinline))",
        "-D__launch_bounds__(...)="};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) flags.insert(flags.end(), {"-mavx2", "-mfma"});
#endif
    for (const std::string& option : options.compiler) {
        if (option.compare(0, 5, "-std=") == 0) flags.push_back(option);
    }
    if (checks) flags.insert(flags.end(), {"-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"});
    flags.insert(flags.end(), {"expanded.cpp", "-o", "kernel.s"});
    return flags;
}

// Directory of this library, determined while it is loaded: its name may be relative to a working directory that changes later.
std::string find_library_directory() {
    Dl_info self;
    dladdr(reinterpret_cast<void*>(find_library_directory), &self);
    std::string path = std::filesystem::canonical(self.dli_fname).string();
    return path.substr(0, path.rfind('/'));
}
const std::string library_directory = find_library_directory();

// The object lists libcuda.so.1 as needed, so that the loader finds the copy that loads it.
std::vector<std::string> link_flags() {
    return {"g++", "-shared", "-Wl,-Bsymbolic", "kernel.s", library_directory + "/libcuda.so.1", "-lm", "-o", "kernel.so"};
}

// Adds the gap after the zeros of every function's static (see `__shared__`). Its symbol keeps its size.
std::string add_shared_gaps(const std::string& assembly) {
    std::istringstream lines(assembly);
    std::string line, result;
    bool in_shared = false;
    result.reserve(assembly.size() + assembly.size() / 64);
    while (std::getline(lines, line)) {
        result += line + "\n";
        if (line.find("\t.section\t") == 0) in_shared = line.find(".bss._ZZ") != std::string::npos;
        bool zeros = line.find("\t.zero\t") == 0 || line.find("\t.space\t") == 0;
        if (in_shared && zeros) result += "\t.zero\t" + std::to_string(SHARED_GAP_BYTES) + "\n";
    }
    return result;
}

std::string make_image(const std::vector<EntryPoint>& entries, const Options& options, bool checks, const std::string& object) {
    ImageHeader header = {};
    memcpy(header.magic, IMAGE_MAGIC, sizeof header.magic);
    header.version = IMAGE_VERSION;
    header.checks = checks;
    header.capability = options.capability;
    header.entry_count = (uint32_t)entries.size();
    header.object_offset = sizeof header + entries.size() * sizeof(ImageEntry);
    header.object_bytes = object.size();
    std::string image(reinterpret_cast<const char*>(&header), sizeof header);
    for (const EntryPoint& entry : entries) {
        ImageEntry row = {};
        entry.name.copy(row.name, sizeof row.name - 1);
        image.append(reinterpret_cast<const char*>(&row), sizeof row);
    }
    return image + object;
}

// A header's name may contain directories, but not lead outside.
bool write_sources(const Program& program, const std::string& directory, std::string& log) {
    std::string ignored;
    bool written = run_program(directory, {"mkdir", "hearth_host"}, ignored);
    for (const auto& [name, text] : embedded_headers()) written = written && write_file(directory + "/hearth_host/" + name, text);
    for (const auto& [name, text] : program.headers) {
        if (name.empty() || name[0] == '/' || name.find("..") != std::string::npos) {
            log += "nvrtc: error: bad name of a header: " + name + "\n";
            return false;
        }
        size_t slash = name.rfind('/');
        if (slash != std::string::npos) written = written && run_program(directory, {"mkdir", "-p", name.substr(0, slash)}, ignored);
        written = written && write_file(directory + "/" + name, text);
    }
    written = written && write_file(directory + "/" + program.name, program.source);
    if (!written) log += "nvrtc: error: the temporary directory cannot be written\n";
    return written;
}

bool build(const Program& program, const Options& options, bool checks, std::string& image, std::string& log) {
    PrivateDirectory directory;
    const std::string& path = directory.path();
    std::string text, object;
    if (!write_sources(program, path, log)) return false;
    if (!run_program(path, preprocess_flags(options, program.name), log)) return false;
    if (!read_file(path + "/expanded.cpp", text)) return false;
    std::vector<EntryPoint> entries = find_entry_points(text);
    if (!write_file(path + "/expanded.cpp", text + entry_point_glue(entries))) return false;
    if (!run_program(path, compile_flags(options, checks), log)) return false;
    if (!read_file(path + "/kernel.s", text) || !write_file(path + "/kernel.s", add_shared_gaps(text))) return false;
    if (!run_program(path, link_flags(), log)) return false;
    if (!read_file(path + "/kernel.so", object)) return false;
    image = make_image(entries, options, checks, object);
    return true;
}

}  // namespace

bool compile(const Program& program, const Options& options, bool checks, std::string& image, std::string& log) {
    std::vector<std::string> key = {program.name, program.source, checks ? "checks" : ""};
    auto add_files = [&](const std::vector<SourceFile>& files) {
        for (const auto& [name, text] : files) key.insert(key.end(), {name, text});
    };
    add_files(program.headers);
    add_files(embedded_headers());
    for (const auto& flags : {preprocess_flags(options, program.name), compile_flags(options, checks)}) {
        key.insert(key.end(), flags.begin(), flags.end());
    }
    key.push_back(std::to_string(IMAGE_VERSION) + " " + std::to_string(SHARED_GAP_BYTES) + " " __VERSION__);
    CacheEntry entry(key);
    if (entry.load(image)) return true;
    if (!build(program, options, checks, image, log)) return false;
    entry.store(image);
    return true;
}

}  // namespace hearth
