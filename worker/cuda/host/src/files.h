// Files, private directories, child processes and the on-disk cache for the compiler.
#pragma once

#include <string>
#include <vector>

namespace hearth {

bool read_file(const std::string& path, std::string& text);
bool write_file(const std::string& path, const std::string& text);

// A new directory that is removed with the object.
class PrivateDirectory {
public:
    PrivateDirectory();
    ~PrivateDirectory();
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

// Runs a program in a directory and waits; its stdout and stderr are appended to `output`. Returns false if it fails.
bool run_program(const std::string& directory, const std::vector<std::string>& arguments, std::string& output);

// Data stored under the key of all `parts`; their order and boundaries matter.
class CacheEntry {
public:
    explicit CacheEntry(const std::vector<std::string>& parts);
    bool load(std::string& bytes) const;
    void store(const std::string& bytes) const;

private:
    std::string path_;
};

}  // namespace hearth
