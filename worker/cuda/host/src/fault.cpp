#include "fault.h"

#include <cstdarg>
#include <cstdio>

#include "config.h"

namespace hearth {

std::string format(const char* pattern, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

void report(const Fault& fault) {
    fprintf(stderr, "host model: %s\n", fault.text.c_str());
    if (config().report.empty()) return;
    if (FILE* file = fopen(config().report.c_str(), "a")) {
        fprintf(file, "%s\n", fault.text.c_str());
        fclose(file);
    }
}

}  // namespace hearth
