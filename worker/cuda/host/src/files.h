// Files, private directories, child processes and the cache on disk, as the compiler needs them.
#pragma once

#include <string>
#include <vector>

namespace hearth {

bool read_file(const std::string& path, std::string& text);
bool write_file(const std::string& path, const std::string& text);

// A new directory that goes with the object.
class PrivateDirectory {
public:
    PrivateDirectory();
    ~PrivateDirectory();
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

// Runs a program in a directory and waits; its stdout and stderr are appended to `output`. False when it fails.
bool run_program(const std::string& directory, const std::vector<std::string>& arguments, std::string& output);

// What was stored under the key of all `parts`; their order and boundaries count.
class CacheEntry {
public:
    explicit CacheEntry(const std::vector<std::string>& parts);
    bool load(std::string& bytes) const;
    void store(const std::string& bytes) const;

private:
    std::string path_;
};

}  // namespace hearth
