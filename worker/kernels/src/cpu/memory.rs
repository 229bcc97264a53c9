//! Memory of the CPU backend: reusable aligned buffers, tensors, and matrices that several threads fill.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};

use super::CpuBackend;
use crate::ops::MemoryOps;
use crate::{HostMatrix, KernelError, checks};

/// One cache line; the unit and alignment of every buffer.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// f32 elements aligned to a cache line, always initialised.
#[derive(Default)]
pub(crate) struct AlignedBuf(Vec<Line>);

impl AlignedBuf {
    /// Allocates at least `n` elements; their contents are unspecified.
    fn with_capacity(n: usize) -> Self {
        Self(vec![Line([0.0; 16]); n.div_ceil(16)])
    }

    /// Grows to at least `n` elements and returns exactly that many, with unspecified contents.
    pub(crate) fn f32s_mut(&mut self, n: usize) -> &mut [f32] {
        let lines = n.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..n]
    }

    fn f32s(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Used buffers kept for reuse, so that a decode step neither allocates nor touches
/// fresh pages.
#[derive(Default)]
pub(crate) struct FreeList {
    buffers: Mutex<Vec<Kept>>,
}

/// A buffer that nobody uses.
struct Kept {
    buffer: AlignedBuf,
    since: Instant,
}

/// Maximum number of buffers in the free list; beyond it, the smallest is released.
const KEPT_BUFFERS: usize = 48;
/// Time after which a buffer that nobody uses is released: the memory that a long prompt needs is others' while its answer is decoded.
const KEPT_FOR: Duration = Duration::from_secs(2);

/// Bytes released at once from which on the allocator gives them back to the system: it looks at all memory that is free.
const TRIMMED_BYTES: usize = 1 << 20;

/// Gives freed memory back to the system; small buffers stay with the allocator else.
fn trim() {
    // SAFETY: no requirements; it takes the allocator's locks.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

impl FreeList {
    /// Takes a buffer of at least `n` elements with unspecified contents. Prefers the smallest that fits, and
    /// skips those that are far too large.
    pub(crate) fn take(self: &Arc<Self>, n: usize) -> PooledBuf {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = n.saturating_mul(8).max(1 << 14);
        let fitting = buffers
            .iter()
            .enumerate()
            .filter(|(_, kept)| (n..=limit).contains(&kept.len()))
            .min_by_key(|(_, kept)| kept.len())
            .map(|(i, _)| i);
        let buffer = match fitting {
            Some(i) => {
                let mut buffer = buffers.swap_remove(i).buffer;
                if cfg!(debug_assertions) {
                    // Makes reads of unwritten elements visible.
                    buffer.f32s_mut(n).fill(f32::NAN);
                }
                buffer
            }
            None => AlignedBuf::with_capacity(n),
        };
        PooledBuf {
            buffer,
            home: Arc::clone(self),
        }
    }

    fn give_back(&self, buffer: AlignedBuf, since: Instant) {
        let released_bytes = self.keep(buffer, since);
        if released_bytes >= TRIMMED_BYTES {
            trim();
        }
    }

    /// Adds a buffer; returns the bytes of those that are released in turn.
    fn keep(&self, buffer: AlignedBuf, since: Instant) -> usize {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut released = 0;
        buffers.retain(|kept| {
            let is_kept = since.saturating_duration_since(kept.since) <= KEPT_FOR;
            released += if is_kept { 0 } else { kept.len() };
            is_kept
        });
        buffers.push(Kept { buffer, since });
        if buffers.len() > KEPT_BUFFERS {
            let smallest = (0..buffers.len()).min_by_key(|&i| buffers[i].len());
            if let Some(i) = smallest {
                buffers.swap_remove(i);
            }
        }
        released * size_of::<f32>()
    }
}

impl Kept {
    /// Elements of the buffer.
    fn len(&self) -> usize {
        self.buffer.f32s().len()
    }
}

/// A buffer that returns to its free list when dropped.
pub(crate) struct PooledBuf {
    buffer: AlignedBuf,
    home: Arc<FreeList>,
}

impl PooledBuf {
    pub(crate) fn f32s(&self, n: usize) -> &[f32] {
        &self.buffer.f32s()[..n]
    }

    pub(crate) fn f32s_mut(&mut self, n: usize) -> &mut [f32] {
        self.buffer.f32s_mut(n)
    }
}

impl Drop for PooledBuf {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        self.home.give_back(buffer, Instant::now());
    }
}

/// f32 activations `[rows, cols]` in host memory.
pub struct CpuTensor {
    buffer: PooledBuf,
    rows: usize,
    cols: usize,
}

impl CpuTensor {
    /// Allocates a tensor with unspecified contents.
    pub(crate) fn uninit(free: &Arc<FreeList>, rows: usize, cols: usize) -> Self {
        Self {
            buffer: free.take(rows * cols),
            rows,
            cols,
        }
    }

    /// Rows (tokens).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements, row-major.
    pub fn as_slice(&self) -> &[f32] {
        self.buffer.f32s(self.rows * self.cols)
    }

    /// The elements, row-major.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        self.buffer.f32s_mut(self.rows * self.cols)
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.as_slice()[row * self.cols..(row + 1) * self.cols]
    }
}

impl MemoryOps for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = HostMatrix;
    type Vector = Arc<[f32]>;
    /// The bytes themselves.
    type HostCopy = Vec<u8>;
    /// The activations themselves.
    type Incoming = CpuTensor;

    fn weight(&self, matrix: &HostMatrix) -> Result<HostMatrix, KernelError> {
        Ok(matrix.clone())
    }

    fn weight_rows(
        &self,
        w: &HostMatrix,
        first: usize,
        rows: usize,
    ) -> Result<HostMatrix, KernelError> {
        checks::weight_rows(first, rows, w.rows())?;
        w.row_slice(first, rows)
    }

    fn vector(&self, values: &[f32]) -> Result<Arc<[f32]>, KernelError> {
        Ok(values.into())
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Result<CpuTensor, KernelError> {
        checks::upload((rows, cols), values.len())?;
        let mut x = self.tensor(rows, cols);
        x.as_mut_slice().copy_from_slice(values);
        Ok(x)
    }

    fn download(&self, x: &CpuTensor) -> Result<Vec<f32>, KernelError> {
        Ok(x.as_slice().to_vec())
    }

    fn rows_read_begin(&self, x: &CpuTensor, rows: Range<usize>) -> Result<Vec<u8>, KernelError> {
        checks::rows_read((x.rows(), x.cols()), &rows)?;
        let values = &x.as_slice()[rows.start * x.cols()..rows.end * x.cols()];
        Ok(values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect())
    }

    fn host_copy_is_done(&self, _copy: &Vec<u8>) -> Result<bool, KernelError> {
        Ok(true)
    }

    fn host_copy_wait(&self, _copy: &Vec<u8>) -> Result<(), KernelError> {
        Ok(())
    }

    fn host_copy_end(&self, copy: Vec<u8>) -> Result<Vec<u8>, KernelError> {
        Ok(copy)
    }

    fn rows_write_begin(&self, rows: usize, cols: usize) -> Result<CpuTensor, KernelError> {
        self.zeros(rows, cols)
    }

    fn rows_write(
        &self,
        incoming: &mut CpuTensor,
        first: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let cols = incoming.cols();
        checks::rows_write((incoming.rows(), cols), first, values.len())?;
        let from = first * cols;
        incoming.as_mut_slice()[from..from + values.len()].copy_from_slice(values);
        Ok(())
    }

    fn rows_write_end(&self, incoming: CpuTensor) -> Result<CpuTensor, KernelError> {
        Ok(incoming)
    }

    fn shape(&self, x: &CpuTensor) -> (usize, usize) {
        (x.rows(), x.cols())
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<CpuTensor, KernelError> {
        let mut x = self.tensor(rows, cols);
        x.as_mut_slice().fill(0.0);
        Ok(x)
    }
}

/// Working memory of one thread of the pool.
#[derive(Default)]
pub(crate) struct Scratch {
    /// A piece's result before it is scattered.
    pub(crate) tile: AlignedBuf,
    /// A second result (`up` in addition to `gate`).
    pub(crate) tile2: AlignedBuf,
    /// Memory for the kernels only.
    pub(crate) kernel: KernelScratch,
}

/// Working memory for a kernel while it runs.
#[derive(Default)]
pub(crate) struct KernelScratch {
    /// Unpacked weights or keys.
    pub(crate) weights: AlignedBuf,
    /// Unpacked values, or queries.
    pub(crate) values: AlignedBuf,
    /// Running accumulators.
    pub(crate) sums: AlignedBuf,
    /// Scores and scales.
    pub(crate) scores: AlignedBuf,
}

/// A matrix `[rows, cols]` that several pieces write at once, each piece its own parts.
pub(crate) struct SharedMatrix<'a, T> {
    data: *mut T,
    rows: usize,
    cols: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer comes from an exclusive borrow that lives as long as the value, and access is only
// through `part`, whose caller guarantees disjointness.
unsafe impl<T: Send> Sync for SharedMatrix<'_, T> {}

impl<'a, T> SharedMatrix<'a, T> {
    /// Shares `data`, which holds rows of `cols` elements.
    pub(crate) fn new(data: &'a mut [T], cols: usize) -> Self {
        Self {
            rows: data.len().checked_div(cols).unwrap_or(0),
            cols,
            data: data.as_mut_ptr(),
            borrow: PhantomData,
        }
    }

    /// Columns `cols` of row `row`. Panics if they are outside the matrix.
    ///
    /// # Safety
    /// While the slice lives, no other piece may hold any of these elements.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise
    pub(crate) unsafe fn part(&self, row: usize, cols: Range<usize>) -> &mut [T] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: the range lies inside the borrowed slice by the assertion; the caller promises that
        // no one else holds these elements.
        unsafe {
            std::slice::from_raw_parts_mut(self.data.add(row * self.cols + cols.start), cols.len())
        }
    }

    /// The whole rows `rows`, for reading.
    ///
    /// # Safety
    /// While the slice lives, no piece may write any of these elements, and other threads' writes to them
    /// must have been published to this one.
    pub(crate) unsafe fn rows(&self, rows: Range<usize>) -> &[T] {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        // SAFETY: as in `part`, with the caller's promise that these elements are no longer written.
        unsafe {
            std::slice::from_raw_parts(
                self.data.add(rows.start * self.cols),
                rows.len() * self.cols,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(free: &FreeList) -> Vec<usize> {
        let buffers = free.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.iter().map(Kept::len).collect()
    }

    #[test]
    fn buffers_that_nobody_uses_are_released() {
        let free = Arc::new(FreeList::default());
        let begin = Instant::now();
        let after = |part: f64| begin + KEPT_FOR.mul_f64(part);
        free.give_back(AlignedBuf::with_capacity(1 << 20), begin);
        free.give_back(AlignedBuf::with_capacity(16), after(0.9));
        assert_eq!(kept(&free), [1 << 20, 16]);
        // A prompt's buffer has its time; the others are in use.
        free.give_back(AlignedBuf::with_capacity(32), after(1.1));
        assert_eq!(kept(&free), [16, 32]);
        drop(free.take(32));
        assert_eq!(kept(&free), [16, 32], "the one in use is taken again");
    }
}
