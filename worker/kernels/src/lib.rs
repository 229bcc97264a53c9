//! The backend trait, the scalar reference kernels that specify it, and the CPU kernels per instruction set.
