#include "config.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace hearth {
namespace {

std::string text(const char* name, const char* absent) {
    const char* value = getenv(name);
    return value != nullptr && *value != '\0' ? value : absent;
}

bool flag(const char* name) {
    std::string value = text(name, "0");
    return value != "0";
}

Config read() {
    Config c;
    c.checks = checks_wanted();
    c.shuffled = getenv("HEARTH_HOST_MODEL_SEED") != nullptr;
    c.seed = strtoull(text("HEARTH_HOST_MODEL_SEED", "0").c_str(), nullptr, 10);
    c.memory_bytes = strtoull(text("HEARTH_HOST_MODEL_MEMORY", "2147483648").c_str(), nullptr, 10);
    c.devices = atoi(text("HEARTH_HOST_MODEL_DEVICES", "1").c_str());
    c.driver_version = atoi(text("HEARTH_HOST_MODEL_DRIVER", "12080").c_str());
    c.capability_major = 8;
    c.capability_minor = 9;
    sscanf(text("HEARTH_HOST_MODEL_CAPABILITY", "8.9").c_str(), "%d.%d", &c.capability_major, &c.capability_minor);
    c.host_register = !flag("HEARTH_HOST_MODEL_NO_REGISTER");
    c.read_only_register = c.host_register && !flag("HEARTH_HOST_MODEL_NO_READ_ONLY_REGISTER");
    c.slow_registered_us = (unsigned)strtoul(text("HEARTH_HOST_MODEL_SLOW_REGISTERED_US", "0").c_str(), nullptr, 10);
    c.memory_info_error = atoi(text("HEARTH_HOST_MODEL_MEMORY_INFO_ERROR", "0").c_str());
    c.skipped_wait = strtoull(text("HEARTH_HOST_MODEL_SKIPPED_WAIT", "0").c_str(), nullptr, 10);
    c.report = text("HEARTH_HOST_MODEL_REPORT", "");
    c.lost = text("HEARTH_HOST_MODEL_LOST", "");
    return c;
}

}  // namespace

bool checks_wanted() { return text("HEARTH_HOST_MODEL_CHECKS", "1") != "0"; }

bool devices_lost() { return !config().lost.empty() && access(config().lost.c_str(), F_OK) == 0; }

const Config& config() {
    static const auto& c = *new Config(read());
    return c;
}

}  // namespace hearth
