// The model's way to call an entry point: its parameter types are known only in the kernel's own translation unit.
#pragma once

namespace hearth_host {

template <size_t... I>
struct Indices {};

// Not instrumented: the values are in the model's memory.
template <class... P, size_t... I>
__attribute__((no_sanitize("thread"))) inline void call(void (*kernel)(P...), void** values, Indices<I...>) {
    kernel(*static_cast<P*>(values[I])...);
}

template <class... P>
__attribute__((no_sanitize("thread"))) inline void call(void (*kernel)(P...), void** values) {
    call(kernel, values, Indices<__integer_pack(sizeof...(P))...>());
}

// Size of a parameter in bytes, 0 past the last.
template <class... P>
__attribute__((no_sanitize("thread"))) inline unsigned parameter_size(void (*)(P...), unsigned index) {
    const unsigned sizes[] = {(unsigned)sizeof(P)..., 0u};
    return index < sizeof...(P) ? sizes[index] : 0u;
}

}  // namespace hearth_host
