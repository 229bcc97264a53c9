//! A kernel's parameters by value.

use std::ffi::c_void;

/// Maximum number of parameters of a kernel.
const MOST: usize = 24;
/// Maximum size of all parameters in bytes.
const BYTES: usize = 320;

/// Parameters, each aligned as in C.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Args {
    bytes: Aligned,
    len: usize,
    offsets: [u16; MOST],
    count: usize,
}

#[derive(Clone, PartialEq, Eq)]
#[repr(C, align(16))]
struct Aligned([u8; BYTES]);

/// A type that a kernel takes by value: without uninitialised padding, laid out as in C.
///
/// # Safety
/// Every byte of the value is initialised and the type is `repr(C)` or primitive.
pub(crate) unsafe trait Argument: Copy {}

// SAFETY: primitive.
unsafe impl Argument for i32 {}
// SAFETY: primitive.
unsafe impl Argument for u32 {}
// SAFETY: primitive.
unsafe impl Argument for f32 {}
// SAFETY: primitive; addresses on the device.
unsafe impl Argument for u64 {}
// SAFETY: primitive.
unsafe impl Argument for i64 {}

impl Args {
    pub(crate) fn new() -> Self {
        Self {
            bytes: Aligned([0; BYTES]),
            len: 0,
            offsets: [0; MOST],
            count: 0,
        }
    }

    /// Adds the next parameter.
    pub(crate) fn with<T: Argument>(mut self, value: T) -> Self {
        let (size, align) = (size_of::<T>(), align_of::<T>());
        let at = self.len.next_multiple_of(align);
        assert!(
            at + size <= BYTES && self.count < MOST,
            "a kernel has too many parameters"
        );
        // SAFETY: the range lies in `bytes` by the assertion; every byte of an `Argument` is initialised.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const value).cast::<u8>(),
                self.bytes.0.as_mut_ptr().add(at),
                size,
            );
        }
        self.offsets[self.count] = at as u16;
        self.count += 1;
        self.len = at + size;
        self
    }

    /// One pointer to each parameter, as the driver requires; valid while `self` is not moved.
    pub(crate) fn pointers(&self) -> [*mut c_void; MOST] {
        let mut out = [std::ptr::null_mut(); MOST];
        for (pointer, offset) in out.iter_mut().zip(&self.offsets[..self.count]) {
            *pointer = self.bytes.0[*offset as usize..].as_ptr().cast_mut().cast();
        }
        out
    }
}

impl std::fmt::Debug for Args {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Args({} parameters, {} bytes)", self.count, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_where_c_puts_them() {
        let args = Args::new()
            .with(7_u64)
            .with(3_i32)
            .with(9_u64)
            .with(1.5_f32);
        let pointers = args.pointers();
        let read = |i: usize| pointers[i] as usize - pointers[0] as usize;
        assert_eq!([read(0), read(1), read(2), read(3)], [0, 8, 16, 24]);
        // SAFETY: the fourth parameter is an f32 inside `args`.
        assert_eq!(unsafe { *pointers[3].cast::<f32>() }, 1.5);
        assert!(pointers[4].is_null());
    }
}
