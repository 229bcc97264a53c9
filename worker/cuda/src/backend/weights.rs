//! Weights, vectors and activations: transferred between host and device, in the layout that the kernels read.

use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::ops::MemoryOps;
use hearth_kernels::{DType, HostMatrix, KernelError, checks};

use super::exports::MOST_ROWS_BYTES;
use super::tensor::{WeightBytes, WeightData, weight_type};
use super::{CudaBackend, CudaHostCopy, CudaIncoming, CudaTensor, CudaVector, CudaWeight, Kernel};
use crate::compile::Variant;
use crate::driver::fault;
use crate::memory::{Buffer, Pitched, Source};
use crate::queue::{Args, Command};

/// Multiple to which rows of a weight are padded, so that kernels need no tail along the sum.
pub(super) const PADDED_COLS: usize = 128;

/// Rows of a weight on the device.
pub(super) struct WeightLayout {
    rows: usize,
    row_bytes: usize,
    pitch_bytes: usize,
    /// Elements from one row to the next.
    pub(super) ld: usize,
}

impl WeightLayout {
    pub(super) fn of(matrix: &HostMatrix) -> Self {
        let ld = matrix.cols().next_multiple_of(PADDED_COLS);
        Self {
            rows: matrix.rows(),
            row_bytes: matrix.row_bytes(),
            pitch_bytes: matrix.dtype().row_bytes(ld),
            ld,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows * self.pitch_bytes
    }

    /// Destination of a copy to an address.
    pub(super) fn at(&self, address: u64) -> Pitched {
        Pitched {
            address,
            rows: self.rows,
            row_bytes: self.row_bytes,
            pitch_bytes: self.pitch_bytes,
        }
    }
}

impl MemoryOps for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Vector = CudaVector;
    type HostCopy = CudaHostCopy;
    type Incoming = CudaIncoming;

    fn weight(&self, matrix: &HostMatrix) -> Result<CudaWeight, KernelError> {
        let layout = WeightLayout::of(matrix);
        let data = self.buffer(layout.bytes(), "weights")?;
        self.send(Source::Shared(matrix.data()), layout.at(data.address()))?;
        let scales = match matrix.scales() {
            None => None,
            Some(scales) => Some(self.send_floats(&scales.values, "scales of weights")?),
        };
        let own = WeightBytes::Own;
        let weight = WeightData::new(matrix, own(data), scales.map(own));
        if weight.dtype == DType::F8E4m3 {
            self.refuse_nan(&weight)?;
        }
        self.modules.prepare(self.matrix_variants(weight.dtype));
        Ok(CudaWeight(Arc::new(weight)))
    }

    fn weight_rows(
        &self,
        w: &CudaWeight,
        first: usize,
        rows: usize,
    ) -> Result<CudaWeight, KernelError> {
        checks::weight_rows(first, rows, w.0.rows)?;
        Ok(CudaWeight(Arc::new(WeightData::part(&w.0, first, rows))))
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector, KernelError> {
        Ok(CudaVector {
            data: Arc::new(self.send_floats(values, "vectors")?),
            len: values.len(),
        })
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Result<CudaTensor, KernelError> {
        checks::upload((rows, cols), values.len())?;
        let tensor = self.tensor(rows, cols)?;
        match self.queue.in_place(bytes_of(values))? {
            Some(from) => self.put_rows(tensor.output(), from, (rows, cols))?,
            None => {
                let to = close(tensor.output(), size_of_val(values));
                self.queue.upload(bytes_of(values), to)?;
            }
        }
        Ok(tensor)
    }

    fn download(&self, x: &CudaTensor) -> Result<Vec<f32>, KernelError> {
        let address = self.values(x)?;
        self.queue.download(address, x.elements() * 4, floats)
    }

    /// Longer rows are there when this returns: there is no pinned memory in which so many could land one after the other.
    fn rows_read_begin(
        &self,
        x: &CudaTensor,
        rows: Range<usize>,
    ) -> Result<CudaHostCopy, KernelError> {
        checks::rows_read(x.shape(), &rows)?;
        let bytes = rows.len() * x.cols * 4;
        let from = self.values(x)? + (rows.start * x.cols * 4) as u64;
        if bytes > MOST_ROWS_BYTES {
            let here = self.queue.download(from, bytes, <[u8]>::to_vec)?;
            return Ok(self.exports.landed_before(here));
        }
        let gathered = self.leaving(bytes, "rows on their way")?;
        self.put_rows(gathered.address(), from, (rows.len(), x.cols))?;
        self.export(gathered, bytes)
    }

    fn host_copy_is_done(&self, copy: &CudaHostCopy) -> Result<bool, KernelError> {
        copy.is_done()
    }

    fn host_copy_wait(&self, copy: &CudaHostCopy) -> Result<(), KernelError> {
        copy.wait()
    }

    fn host_copy_end(&self, copy: CudaHostCopy) -> Result<Vec<u8>, KernelError> {
        copy.take()
    }

    fn rows_write_begin(&self, rows: usize, cols: usize) -> Result<CudaIncoming, KernelError> {
        self.incoming(rows, cols)
    }

    fn rows_write(
        &self,
        incoming: &mut CudaIncoming,
        first: usize,
        values: &[f32],
    ) -> Result<(), KernelError> {
        self.copy_rows(incoming, first, values)
    }

    fn rows_write_end(&self, incoming: CudaIncoming) -> Result<CudaTensor, KernelError> {
        self.arrived(incoming)
    }

    fn shape(&self, x: &CudaTensor) -> (usize, usize) {
        x.shape()
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<CudaTensor, KernelError> {
        let tensor = self.tensor(rows, cols)?;
        if tensor.elements() > 0 {
            self.queue.push(Command::Zero {
                address: tensor.output(),
                bytes: tensor.elements() * 4,
            })?;
        }
        Ok(tensor)
    }
}

impl CudaBackend {
    /// Copies host bytes into a newly allocated buffer.
    pub(super) fn send(&self, host: Source<'_>, to: Pitched) -> Result<(), KernelError> {
        if to.rows * to.row_bytes == 0 {
            return Ok(());
        }
        // A reused buffer may still be read by commands that were queued before.
        self.queue.flush()?;
        self.uploader.copy(host, to, self.memory.stream())
    }

    pub(super) fn send_bytes(
        &self,
        host: &[u8],
        what: &'static str,
    ) -> Result<Buffer, KernelError> {
        let buffer = self.buffer(host.len(), what)?;
        self.send(Source::Own(host), close(buffer.address(), host.len()))?;
        Ok(buffer)
    }

    fn send_floats(&self, values: &[f32], what: &'static str) -> Result<Buffer, KernelError> {
        self.send_bytes(bytes_of(values), what)
    }

    /// Refuses NaN codes: the FP8 kernels convert codes to bf16 without checking for them.
    fn refuse_nan(&self, weight: &WeightData) -> Result<(), KernelError> {
        let codes = weight.rows * weight.ld;
        if codes == 0 {
            return Ok(());
        }
        let found = self.send_bytes(&0_i32.to_ne_bytes(), "a flag")?;
        let variant = Variant::plain("find_nan");
        let blocks = codes.div_ceil(256 * 16).min(1024);
        let args = Args::new()
            .with(weight.data.address())
            .with(codes as i64)
            .with(found.address());
        self.launch(Kernel::new(&variant, "find_nan"), [blocks, 1, 1], args)?;
        let is_found = self
            .queue
            .download(found.address(), 4, |b| b.iter().any(|&b| b != 0))?;
        if is_found {
            return Err(nan_found(weight.rows, weight.cols));
        }
        Ok(())
    }

    /// Kernels that will use a weight of this type.
    fn matrix_variants(&self, dtype: DType) -> Vec<Variant> {
        let mut variants = self.matrix_variants_of("linear", dtype);
        variants.push(Variant::with(
            "embed",
            &[("WEIGHT_TYPE", weight_type(dtype))],
        ));
        variants
    }
}

/// Values as they are on the device.
pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks().0.iter();
    words.map(|word| f32::from_ne_bytes(*word)).collect()
}

/// The error of an FP8 weight that holds NaN.
pub(super) fn nan_found(rows: usize, cols: usize) -> KernelError {
    fault(format!(
        "an FP8 weight [{rows}, {cols}] holds NaN (codes 0x7f or 0xff)\n  the file is damaged: download the model again"
    ))
}

pub(super) fn close(address: u64, bytes: usize) -> Pitched {
    Pitched {
        address,
        rows: 1,
        row_bytes: bytes,
        pitch_bytes: bytes,
    }
}

pub(super) fn bytes_of(values: &[f32]) -> &[u8] {
    // SAFETY: f32 has no padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
