#include "files.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

extern char** environ;

namespace hearth {
namespace {

namespace fs = std::filesystem;

std::string cache_directory() {
    if (const char* directory = getenv("HEARTH_CACHE")) return std::string(directory) + "/host-model";
    const char* home = getenv("HOME");
    return std::string(home != nullptr ? home : "/tmp") + "/.cache/hearth/host-model";
}

// 128-bit FNV-1a.
std::string digest(const std::vector<std::string>& parts) {
    unsigned __int128 prime = ((unsigned __int128)1 << 88) + 0x13b;
    unsigned __int128 hash = ((unsigned __int128)0x6c62272e07bb0142 << 64) + 0x62b821756295c58d;
    auto add = [&](const std::string& bytes) {
        for (unsigned char byte : bytes) hash = (hash ^ byte) * prime;
    };
    for (const std::string& part : parts) {
        add(std::to_string(part.size()) + ":");
        add(part);
    }
    char text[33];
    snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)(hash >> 64), (unsigned long long)hash);
    return text;
}

}  // namespace

bool read_file(const std::string& path, std::string& text) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    text.assign(std::istreambuf_iterator<char>(file), {});
    return true;
}

bool write_file(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file.write(text.data(), (std::streamsize)text.size());
    file.close();
    return !file.fail();
}

PrivateDirectory::PrivateDirectory() {
    std::string pattern = fs::temp_directory_path() / "hearth-host-model-XXXXXX";
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
}

PrivateDirectory::~PrivateDirectory() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
}

bool run_program(const std::string& directory, const std::vector<std::string>& arguments, std::string& output) {
    std::string log = directory + "/output.log";
    std::vector<char*> argv;
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    posix_spawn_file_actions_addchdir_np(&actions, directory.c_str());
    pid_t child = 0;
    int error = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) {
        output += arguments[0] + " cannot be started\n";
        return false;
    }
    int status = 0;
    waitpid(child, &status, 0);
    std::string text;
    read_file(log, text);
    output += text;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

CacheEntry::CacheEntry(const std::vector<std::string>& parts) : path_(cache_directory() + "/" + digest(parts)) {}

bool CacheEntry::load(std::string& bytes) const { return read_file(path_, bytes); }

// Renamed into place, so that another process never reads a partial file. A cache that cannot be written is not an error.
void CacheEntry::store(const std::string& bytes) const {
    std::error_code ignored;
    fs::create_directories(fs::path(path_).parent_path(), ignored);
    std::string partial = path_ + "." + std::to_string(getpid());
    if (write_file(partial, bytes)) fs::rename(partial, path_, ignored);
}

}  // namespace hearth
