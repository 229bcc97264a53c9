// A loaded module: the shared object, its entry points, and the location of its static shared memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch.h"
#include "shared_memory.h"

namespace hearth {

// One `__shared__` array in the object.
struct SharedArray {
    std::string owner;     // the entry point that declares it; empty for one in a function that several entry points may call
    std::string name;
    char* address;
    size_t bytes;
};

struct Module {
    Device* device;
    bool checks;
    void* object = nullptr;       // of dlopen
    int file = -1;                // the object's bytes
    char* load_address = nullptr;
    size_t loaded_bytes = 0;
    std::vector<SharedArray> shared;            // by address
    Space shared_space;                         // the section that contains them
    std::unique_ptr<Shadow> shared_shadow;
    std::map<std::string, std::unique_ptr<Function>> functions;

    ~Module();
    bool contains(const void* address) const { return (size_t)((const char*)address - load_address) < loaded_bytes; }
    // Loads an image that the compiler library made.
    static CUresult load(Device* device, const void* image, std::unique_ptr<Module>& module);
};

}  // namespace hearth
