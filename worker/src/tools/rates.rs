//! Rates of a device, by timing what it does: copies into slots, reads of weights, products, small operations, and exchanges
//! with the host.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hearth_crds::GpuProfile;
use hearth_kernels::ops::*;
use hearth_kernels::{BlockScales, DType, HostMatrix, KernelError, SCALE_BLOCK};
use hearth_profiler::three_digits;
use hearth_virtual::VirtualBackend;

/// Share of the device's memory that one matrix of a measurement has.
const MATRIX_SHARE: u64 = 16;
/// Fewest columns of a matrix, and what their number is a multiple of.
const COLUMNS: usize = 64;
/// Rows of activations for a product that is bound by arithmetic.
const PRODUCT_ROWS: usize = 512;
/// Size of the matrix that a slow device is measured with.
#[cfg(feature = "cuda")]
const SMALL_BYTES: u64 = 64 << 10;
/// Bytes that reads beside a copy go over: more than caches hold.
const READ_BYTES: usize = 32 << 20;

/// Bytes as those of a model lie in memory: mapped from a file. Not zeros, which the system would not give memory.
fn weight_bytes(bytes: usize) -> Bytes {
    let own = vec![1_u8; bytes];
    let mapped = || -> std::io::Result<Bytes> {
        let file = rustix::fs::memfd_create("rates", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = std::fs::File::from(file);
        file.write_all(&own)?;
        // SAFETY: nobody else has this file.
        Ok(Bytes::from_owner(unsafe { memmap2::Mmap::map(&file) }?))
    };
    match mapped() {
        Ok(mapped) => mapped,
        Err(error) => {
            tracing::warn!(%error, "copies are measured from memory of no file");
            own.into()
        }
    }
}

/// Matrix `[rows, columns]` of a stored format; the scales of FP8 are 1.
fn matrix_of(dtype: DType, rows: usize, columns: usize) -> Result<HostMatrix, KernelError> {
    let blocks_per_row = columns.div_ceil(SCALE_BLOCK);
    let scales = (dtype == DType::F8E4m3).then(|| BlockScales {
        values: vec![1.0; rows.div_ceil(SCALE_BLOCK) * blocks_per_row].into(),
        blocks_per_row,
    });
    let data = vec![1_u8; rows * dtype.row_bytes(columns)];
    HostMatrix::new(data.into(), dtype, rows, columns, scales)
}

/// A device under measurement, and how its time is told.
pub(super) struct Timed<'a, B> {
    backend: &'a B,
    /// Waits for all that was queued.
    settle: &'a dyn Fn() -> Result<(), KernelError>,
    elapsed_ns: &'a dyn Fn() -> u64,
    /// Shortest time of a measurement: shorter ones are repeated more often.
    least: Duration,
    /// Times that the same operations run, the last of which counts: a device may record them at first.
    passes: u32,
    /// The largest matrix in bytes: more than caches hold.
    most_bytes: u64,
}

/// Rates of a virtual device by its own clock, without those that cannot be measured.
///
/// # Errors
/// [`KernelError::Device`] if its memory is too small for any measurement.
pub(super) fn of_virtual(
    backend: &VirtualBackend,
    memory_bytes: u64,
) -> Result<GpuProfile, KernelError> {
    let timed = Timed {
        backend,
        settle: &|| backend.finish(),
        elapsed_ns: &|| backend.elapsed_ns(),
        least: Duration::from_millis(40),
        passes: 1,
        most_bytes: 32 << 20,
    };
    timed.rates(memory_bytes)
}

/// Rates of a GPU, of whose memory so much may be used.
///
/// # Errors
/// [`KernelError::Device`] if that is too little for any measurement, or the driver fails.
#[cfg(feature = "cuda")]
pub(super) fn of_gpu(
    backend: &hearth_cuda::CudaBackend,
    memory_bytes: u64,
) -> Result<GpuProfile, KernelError> {
    backend.bind_thread()?;
    let last = backend.zeros(1, 1)?;
    let most_bytes = match is_fast(backend)? {
        true => 256 << 20,
        false => SMALL_BYTES,
    };
    let began = Instant::now();
    let timed = Timed {
        backend,
        // What is downloaded comes after all that was queued.
        settle: &|| {
            backend
                .finish()
                .and_then(|()| backend.download(&last))
                .map(drop)
        },
        elapsed_ns: &|| u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX),
        least: Duration::from_millis(4),
        passes: 4,
        most_bytes,
    };
    timed.rates(memory_bytes)
}

/// Whether a small product takes a GPU's time: what only stands for one is measured with little.
#[cfg(feature = "cuda")]
fn is_fast(backend: &hearth_cuda::CudaBackend) -> Result<bool, KernelError> {
    let data = vec![1_u8; SMALL_BYTES as usize];
    let rows = SMALL_BYTES as usize / 2 / COLUMNS;
    let weight = backend.weight(&HostMatrix::new(
        data.into(),
        DType::Bf16,
        rows,
        COLUMNS,
        None,
    )?)?;
    let row = backend.zeros(1, COLUMNS)?;
    let mut best = Duration::MAX;
    // The first time is that of a compilation.
    for _ in 0..4 {
        let began = Instant::now();
        let product = backend.linear(&row, &weight, None)?;
        backend.download(&product)?;
        best = best.min(began.elapsed());
    }
    Ok(best < Duration::from_micros(200))
}

impl<B: Backend + LoadOps> Timed<'_, B> {
    /// Copies alone and beside reads of all CPUs, reads, products, and small operations.
    fn rates(&self, memory_bytes: u64) -> Result<GpuProfile, KernelError> {
        let backend = self.backend;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        backend.bind_thread()?;
        let bytes = (memory_bytes / MATRIX_SHARE).min(self.most_bytes) as usize;
        // About square, so that a product does as much arithmetic as it can with what it reads and writes.
        let columns = ((bytes / 2).isqrt() / COLUMNS).max(1) * COLUMNS;
        let rows = (bytes / 2 / columns).max(1);
        let data = weight_bytes(rows * columns * 2);
        let matrix = HostMatrix::new(data, DType::Bf16, rows, columns, None)?;
        let size = matrix.size_bytes() as f64;
        let copy_gbps = size / self.copy_seconds(&matrix)? / 1e9;
        let copy_beside_reads_gbps = size / self.beside_reads(&matrix, cpus)? / 1e9;
        let weight = backend.weight(&matrix)?;
        // So few values that their bytes take no time.
        let few = backend.zeros(1, COLUMNS)?;
        let mut sum = backend.zeros(1, COLUMNS)?;
        let operation_seconds = self.seconds(|| backend.add_assign(&mut sum, &few))?;
        let one = backend.zeros(1, columns)?;
        // Without what any operation takes, but for what is lost in the noise of the measurement.
        let alone = |measured: f64| (measured - operation_seconds).max(measured / 10.0);
        let read_seconds = self.seconds(|| backend.linear(&one, &weight, None).map(drop))?;
        let many = backend.zeros(PRODUCT_ROWS.min(rows.max(1)), columns)?;
        let (product_rows, _) = backend.shape(&many);
        let product_seconds = self.seconds(|| backend.linear(&many, &weight, None).map(drop))?;
        let flops = 2.0 * product_rows as f64 * rows as f64 * columns as f64;
        let gflops = |seconds: f64| three_digits(flops / alone(seconds) / 1e9);
        let gflops_of = |dtype| {
            let weight = backend.weight(&matrix_of(dtype, rows, columns)?)?;
            let seconds = self.seconds(|| backend.linear(&many, &weight, None).map(drop))?;
            Ok::<_, KernelError>(gflops(seconds))
        };
        Ok(GpuProfile {
            copy_gbps: three_digits(copy_gbps),
            copy_beside_reads_gbps: three_digits(copy_beside_reads_gbps),
            read_gbps: three_digits(size / alone(read_seconds) / 1e9),
            bf16_gflops: gflops(product_seconds),
            fp8_gflops: gflops_of(DType::F8E4m3)?,
            f16_gflops: gflops_of(DType::F16)?,
            f32_weights_gflops: gflops_of(DType::F32)?,
            operation_us: three_digits(operation_seconds * 1e6),
            exchange_us: three_digits(self.exchange_seconds(&few)? * 1e6),
            ..GpuProfile::default()
        })
    }

    /// Seconds to hand a row to the host and back, as a layer whose experts are there does.
    fn exchange_seconds(&self, row: &B::Tensor) -> Result<f64, KernelError> {
        let backend = self.backend;
        let columns = backend.shape(row).1;
        self.seconds(|| {
            let values = backend.download(row)?;
            backend.upload(1, columns, &values).map(drop)
        })
    }

    /// Seconds that a copy of the matrix into a slot takes, one after the other.
    fn copy_seconds(&self, matrix: &HostMatrix) -> Result<f64, KernelError> {
        let backend = self.backend;
        let slots = backend.slots(backend.slot_bytes(matrix), 2)?;
        let mut turn = slots.iter().cycle();
        self.seconds(|| {
            let Some(slot) = turn.next() else {
                return Ok(());
            };
            backend.reuse(slot, Some(&backend.computed()?))?;
            backend.load(matrix, slot, 0)?;
            // An operation waits for the copy, and the measurement for the operation.
            backend.after(&backend.copied()?)?;
            backend.zeros(1, 1).map(drop)
        })
    }

    /// The same while `cpus` threads read memory.
    fn beside_reads(&self, matrix: &HostMatrix, cpus: usize) -> Result<f64, KernelError> {
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    if hearth_kernels::read_bandwidth_gbps(cpus, READ_BYTES).is_err() {
                        return;
                    }
                }
            });
            let measured = self.copy_seconds(matrix);
            ends.store(true, Ordering::Relaxed);
            measured
        })
    }

    /// Seconds by its clock that one call takes on the device, once it has taken some time in sum.
    fn seconds(
        &self,
        mut call: impl FnMut() -> Result<(), KernelError>,
    ) -> Result<f64, KernelError> {
        let mut times = 1_u32;
        loop {
            let mut took = Duration::ZERO;
            for _ in 0..self.passes {
                (self.settle)()?;
                self.backend.begin_pass(1)?;
                let begin_ns = (self.elapsed_ns)();
                for _ in 0..times {
                    call()?;
                }
                (self.settle)()?;
                took = Duration::from_nanos((self.elapsed_ns)() - begin_ns);
            }
            if took >= self.least {
                return Ok(took.as_secs_f64() / f64::from(times));
            }
            times = times.saturating_mul(if took < self.least / 8 { 8 } else { 2 });
        }
    }
}
