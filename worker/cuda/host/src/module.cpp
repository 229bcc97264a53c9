#include "module.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "config.h"
#include "device.h"
#include "image.h"

namespace hearth {
namespace {

// A static of a function is mangled _ZZ<function>E<name>; an extern "C" function is <length><name> there.
SharedArray describe_symbol(const char* symbol, const ImageEntry* entries, uint32_t entry_count) {
    SharedArray array = {"", symbol, nullptr, 0};
    if (char* readable = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr)) {
        array.name = readable;
        free(readable);
    }
    for (uint32_t i = 0; i < entry_count; i++) {
        std::string start = format("_ZZ%zu%sE", strlen(entries[i].name), entries[i].name);
        if (strncmp(symbol, start.c_str(), start.size()) == 0) array.owner = entries[i].name;
    }
    return array;
}

// A shadow determines alignment by offsets, so the space starts at a multiple of the largest alignment.
void find_shared_space(Module& module, const ElfW(Shdr)& bss) {
    if (module.shared.empty()) return;
    size_t skipped = bss.sh_addr % 16;
    module.shared_space = {module.load_address + bss.sh_addr - skipped, bss.sh_size + skipped, nullptr};
    if (!module.checks) return;
    module.shared_shadow = std::make_unique<Shadow>(module.shared_space.bytes);
    module.shared_space.shadow = module.shared_shadow.get();
}

// Every static of a function in .bss is `__shared__`: kernels have no other writable statics.
void find_shared(Module& module, const char* object, const ImageEntry* entries, uint32_t entry_count) {
    const auto* elf = reinterpret_cast<const ElfW(Ehdr)*>(object);
    const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(object + elf->e_shoff);
    const ElfW(Shdr)* bss = nullptr;
    for (int s = 0; s < elf->e_shnum; s++) {
        bool writable_zeros = sections[s].sh_type == SHT_NOBITS && (sections[s].sh_flags & SHF_TLS) == 0;
        if (writable_zeros) bss = &sections[s];
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(object + sections[s].sh_offset);
        const char* names = object + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            const auto& symbol = symbols[i];
            const char* name = names + symbol.st_name;
            if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || strncmp(name, "_ZZ", 3) != 0) continue;
            if (symbol.st_shndx >= elf->e_shnum || sections[symbol.st_shndx].sh_type != SHT_NOBITS) continue;
            SharedArray array = describe_symbol(name, entries, entry_count);
            array.address = module.load_address + symbol.st_value;
            array.bytes = symbol.st_size;
            module.shared.push_back(array);
        }
    }
    std::sort(module.shared.begin(), module.shared.end(),
              [](const SharedArray& a, const SharedArray& b) { return a.address < b.address; });
    if (bss != nullptr) find_shared_space(module, *bss);
}

size_t memory_bytes(const char* object) {
    const auto* elf = reinterpret_cast<const ElfW(Ehdr)*>(object);
    const auto* segments = reinterpret_cast<const ElfW(Phdr)*>(object + elf->e_phoff);
    size_t end = 0;
    for (int s = 0; s < elf->e_phnum; s++) {
        if (segments[s].p_type == PT_LOAD) end = std::max<size_t>(end, segments[s].p_vaddr + segments[s].p_memsz);
    }
    return end;
}

template <class F>
F symbol(const Module& module, const char* prefix, const char* name) {
    return reinterpret_cast<F>(dlsym(module.object, (std::string(prefix) + name).c_str()));
}

CUresult add_function(Module& module, const char* name) {
    auto call = symbol<void (*)(void**)>(module, "hearth_host_call_", name);
    auto parameter = symbol<unsigned (*)(unsigned)>(module, "hearth_host_parameter_", name);
    auto bounds = symbol<unsigned (*)()>(module, "hearth_host_bounds_", name);
    if (call == nullptr || parameter == nullptr || bounds == nullptr) return CUDA_ERROR_INVALID_IMAGE;
    auto function = std::make_unique<Function>();
    function->module = &module;
    function->name = name;
    function->call = call;
    for (unsigned i = 0; parameter(i) != 0; i++) function->parameter_bytes.push_back(parameter(i));
    function->max_threads = bounds();
    function->static_shared_bytes = 0;
    unsigned own_bytes = 0;
    for (const SharedArray& array : module.shared) {
        if (array.owner == name) own_bytes += array.bytes;
        if (array.owner.empty() || array.owner == name) function->static_shared_bytes += array.bytes;
    }
    if (own_bytes > SHARED_BYTES) {
        fprintf(stderr, "host model: kernel %s has %u bytes of static shared memory, more than %u\n", name, own_bytes, SHARED_BYTES);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    function->max_dynamic_shared_bytes = SHARED_BYTES - std::min(SHARED_BYTES, function->static_shared_bytes);
    module.functions[name] = std::move(function);
    return CUDA_SUCCESS;
}

CUresult check_header(const ImageHeader& header) {
    if (memcmp(header.magic, IMAGE_MAGIC, sizeof header.magic) != 0 || header.version != IMAGE_VERSION) return CUDA_ERROR_INVALID_IMAGE;
    // As for a cubin: same major version, and no later minor version.
    uint32_t major = header.capability / 10, minor = header.capability % 10;
    if ((int)major != config().capability_major || (int)minor > config().capability_minor) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if ((header.checks != 0) != config().checks) {
        fprintf(stderr, "host model: this module was compiled %s checks and the driver runs %s them: a stale cache of modules?\n",
                header.checks != 0 ? "with" : "without", config().checks ? "with" : "without");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    return CUDA_SUCCESS;
}

}  // namespace

CUresult Module::load(Device* device, const void* image, std::unique_ptr<Module>& module) {
    const auto& header = *static_cast<const ImageHeader*>(image);
    if (CUresult status = check_header(header); status != CUDA_SUCCESS) return status;
    const auto* entries = reinterpret_cast<const ImageEntry*>(&header + 1);
    const char* object = static_cast<const char*>(image) + header.object_offset;
    module = std::make_unique<Module>();
    module->device = device;
    module->checks = header.checks != 0;
    // A separate file for each load: the loader would otherwise share one object, and with it the shared memory.
    module->file = memfd_create("hearth-host-model", MFD_CLOEXEC);
    for (uint64_t written = 0; written < header.object_bytes;) {
        ssize_t n = write(module->file, object + written, header.object_bytes - written);
        if (n <= 0) return CUDA_ERROR_OUT_OF_MEMORY;
        written += n;
    }
    module->object = dlopen(format("/proc/self/fd/%d", module->file).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module->object == nullptr) {
        fprintf(stderr, "host model: %s\n", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    link_map* map = nullptr;
    dlinfo(module->object, RTLD_DI_LINKMAP, &map);
    module->load_address = reinterpret_cast<char*>(map->l_addr);
    module->loaded_bytes = memory_bytes(object);
    find_shared(*module, object, entries, header.entry_count);
    for (uint32_t i = 0; i < header.entry_count; i++) {
        if (CUresult status = add_function(*module, entries[i].name); status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

Module::~Module() {
    if (object != nullptr) dlclose(object);
    if (file >= 0) close(file);
}

}  // namespace hearth
