//! What the allocator keeps of memory that is freed.

/// Sizes from which on freed buffers go back to the system at once.
#[cfg(target_env = "gnu")]
const RETURNED_BYTES: libc::c_int = 4 << 20;

/// Lets large buffers go back to the system when they are freed. By itself glibc raises that size up to 32 MiB with what is freed
/// (`mallopt(3)`, `M_MMAP_THRESHOLD`): the memory of a long prompt then stays with the process.
pub(crate) fn return_large_buffers() {
    // SAFETY: no other thread runs yet.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, RETURNED_BYTES);
    }
}
