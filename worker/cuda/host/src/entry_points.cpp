#include "entry_points.h"

#include <cctype>

namespace hearth {
namespace {

bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

// Reads C++ tokens: words, and other characters one by one.
class Reader {
public:
    Reader(const std::string& text, size_t position) : text_(text), position_(position) {}

    std::string next() {
        while (position_ < text_.size() && isspace((unsigned char)text_[position_])) position_++;
        size_t begin = position_;
        while (position_ < text_.size() && is_word(text_[position_])) position_++;
        if (position_ == begin && position_ < text_.size()) position_++;
        return text_.substr(begin, position_ - begin);
    }

    // Reads the contents of the parentheses that are open now, up to the comma or parenthesis that ends the first argument.
    std::string first_argument() {
        std::string first;
        bool in_first = true;
        for (int depth = 1; position_ < text_.size() && depth > 0; position_++) {
            char c = text_[position_];
            depth += (c == '(') - (c == ')');
            in_first = in_first && depth > 0 && !(c == ',' && depth == 1);
            if (in_first) first += c;
        }
        return first;
    }

private:
    const std::string& text_;
    size_t position_;
};

bool follows_extern_c(const std::string& text, size_t position) {
    static const std::string EXTERN_C = "extern \"C\"";
    while (position > 0 && isspace((unsigned char)text[position - 1])) position--;
    return position >= EXTERN_C.size() && text.compare(position - EXTERN_C.size(), EXTERN_C.size(), EXTERN_C) == 0;
}

}  // namespace

std::vector<EntryPoint> find_entry_points(const std::string& text) {
    static const std::string GLOBAL = "__global__";
    std::vector<EntryPoint> entries;
    for (size_t at = text.find(GLOBAL); at != std::string::npos; at = text.find(GLOBAL, at + 1)) {
        if (!follows_extern_c(text, at)) continue;
        EntryPoint entry = {"", "1024"};
        Reader reader(text, at + GLOBAL.size());
        std::string token = reader.next();
        for (; token != "(" && !token.empty(); token = reader.next()) {
            if (token == "__launch_bounds__" && reader.next() == "(") {
                entry.max_threads = reader.first_argument();
            } else if (token != "void") {
                entry.name = token;
            }
        }
        if (token == "(" && !entry.name.empty()) entries.push_back(entry);
    }
    return entries;
}

std::string entry_point_glue(const std::vector<EntryPoint>& entries) {
    const std::string exported = "extern \"C\" __attribute__((visibility(\"default\"), no_sanitize(\"thread\"))) ";
    std::string glue = "\n# 1 \"entry points\"\n";
    for (const EntryPoint& entry : entries) {
        glue += exported + "void hearth_host_call_" + entry.name + "(void** values) { hearth_host::call(" + entry.name + ", values); }\n";
        glue += exported + "unsigned hearth_host_parameter_" + entry.name + "(unsigned index) { return hearth_host::parameter_size(" +
                entry.name + ", index); }\n";
        glue += exported + "unsigned hearth_host_bounds_" + entry.name + "() { return " + entry.max_threads + "; }\n";
    }
    return glue;
}

}  // namespace hearth
