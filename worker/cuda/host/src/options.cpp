#include "options.h"

#include <algorithm>
#include <cstdlib>

namespace hearth {
namespace {

bool starts_with(const std::string& text, const std::string& start) { return text.compare(0, start.size(), start) == 0; }

// Options without effect here: the model has one precision and no device code to tune. A trailing `=` accepts any value.
const char* const WITHOUT_EFFECT[] = {
    "-default-device", "--device-as-default-execution-space", "--ptxas-options=", "-Xptxas=", "--maxrregcount=", "-maxrregcount=",
    "--fmad=", "-fmad=", "--ftz=", "-ftz=", "--prec-div=", "-prec-div=", "--prec-sqrt=", "-prec-sqrt=", "--generate-line-info",
    "-lineinfo", "--device-debug", "-G", "--restrict", "-restrict", "--extra-device-vectorization", "-extra-device-vectorization",
    "--diag-suppress=", "-diag-suppress=", "--disable-warnings", "-w", "--dopt=", "-dopt=", "--relocatable-device-code=false",
    "--minimal", "-minimal", "--split-compile=", "--no-cache", "-no-cache",
};

bool has_no_effect(const std::string& option) {
    return std::any_of(std::begin(WITHOUT_EFFECT), std::end(WITHOUT_EFFECT), [&](const std::string& known) {
        return known.back() == '=' ? starts_with(option, known) : option == known;
    });
}

bool parse_architecture(const std::string& name, Options& options) {
    options.real = starts_with(name, "sm_");
    if (!options.real && !starts_with(name, "compute_")) return false;
    std::string digits = name.substr(name.find('_') + 1);
    options.specific = !digits.empty() && (digits.back() == 'a' || digits.back() == 'f');
    if (options.specific) digits.pop_back();
    options.capability = (unsigned)atoi(digits.c_str());
    if (options.specific && options.capability < 90) return false;
    return std::find(ARCHITECTURES.begin(), ARCHITECTURES.end(), (int)options.capability) != ARCHITECTURES.end() &&
           std::to_string(options.capability) == digits;
}

// Takes the value of an option that may be written as `name=value`, `namevalue` (short ones) or `name value`.
bool take_value(const std::vector<std::string>& arguments, size_t& i, const std::vector<std::string>& names, std::string& value) {
    for (const std::string& name : names) {
        bool is_letter = name.size() == 2;
        if (arguments[i] == name) {
            if (i + 1 == arguments.size()) return false;
            value = arguments[++i];
            return true;
        }
        if (starts_with(arguments[i], name + "=") || (is_letter && starts_with(arguments[i], name))) {
            value = arguments[i].substr(name.size() + !is_letter);
            return true;
        }
    }
    return false;
}

bool parse_option(const std::vector<std::string>& arguments, size_t& i, Options& options) {
    std::string value;
    if (has_no_effect(arguments[i])) return true;
    if (take_value(arguments, i, {"--gpu-architecture", "-arch"}, value)) return parse_architecture(value, options);
    if (take_value(arguments, i, {"--std", "-std"}, value)) {
        bool known = value == "c++03" || value == "c++11" || value == "c++14" || value == "c++17" || value == "c++20";
        // The model's own headers need C++17.
        options.compiler.push_back(value == "c++20" ? "-std=c++20" : "-std=c++17");
        return known;
    }
    if (take_value(arguments, i, {"--define-macro", "-D"}, value)) {
        options.compiler.push_back("-D" + value);
        return true;
    }
    if (take_value(arguments, i, {"--undefine-macro", "-U"}, value)) {
        options.compiler.push_back("-U" + value);
        return true;
    }
    if (take_value(arguments, i, {"--include-path", "-I"}, value)) {
        options.compiler.push_back("-I" + value);
        return true;
    }
    return false;
}

}  // namespace

const std::vector<int> ARCHITECTURES = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120};

bool parse_options(const std::vector<std::string>& arguments, Options& options, std::string& log) {
    options.compiler = {"-std=c++17"};
    for (size_t i = 0; i < arguments.size(); i++) {
        size_t first = i;
        if (parse_option(arguments, i, options)) continue;
        log = "nvrtc: error: invalid option " + arguments[first] + "\n";
        return false;
    }
    return true;
}

}  // namespace hearth
