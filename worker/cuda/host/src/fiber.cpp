#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
asm(R"(
.text
.globl hearth_host_switch_stack
.hidden hearth_host_switch_stack
.type hearth_host_switch_stack, @function
hearth_host_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size hearth_host_switch_stack, .-hearth_host_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl hearth_host_switch_stack
.hidden hearth_host_switch_stack
.type hearth_host_switch_stack, %function
hearth_host_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size hearth_host_switch_stack, .-hearth_host_switch_stack
)");
#endif

namespace hearth {

Stacks::Stacks() {
    void* memory = mmap(nullptr, MAX_THREADS * STRIDE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("host model: no memory for the stacks of threads");
        abort();
    }
    base_ = static_cast<char*>(memory);
    for (unsigned thread = 0; thread < MAX_THREADS; thread++) mprotect(base_ + thread * STRIDE, GUARD, PROT_NONE);
}

void* Stacks::prepare(unsigned thread, void (*entry)()) const {
    // Stacks that are a power of two apart would all use the same cache sets, so their tops are staggered.
    char* top = high(thread) - 64 * (thread % 61) - 64;
#if defined(__x86_64__)
    // Six registers, the return address, and one word that keeps the alignment a call would give.
    void** frame = reinterpret_cast<void**>(top) - 8;
    memset(frame, 0, 8 * sizeof(void*));
    frame[6] = reinterpret_cast<void*>(entry);
#elif defined(__aarch64__)
    void** frame = reinterpret_cast<void**>(top) - 20;
    memset(frame, 0, 20 * sizeof(void*));
    frame[11] = reinterpret_cast<void*>(entry);
#endif
    return frame;
}

}  // namespace hearth
