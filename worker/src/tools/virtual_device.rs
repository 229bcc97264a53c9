//! Measures a virtual device, which stands for a GPU in a profile: its memory and its rates, by timing what it does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use hearth_crds::{GPU_RANK_THREADS, GpuProfile, NodeProfileStatus, VIRTUAL_UUID};
use hearth_kernels::ops::*;
use hearth_kernels::{CpuOptions, DType, HostMatrix, KernelError};
use hearth_profiler::three_digits;
use hearth_virtual::{VirtualBackend, VirtualOptions, VirtualTensor};

use crate::device::{DeviceArg, VirtualArg};

/// Share of the device's memory that one matrix of a measurement has.
const MATRIX_SHARE: u64 = 16;
/// The largest matrix of a measurement in bytes: more than caches hold.
const MOST_BYTES: u64 = 32 << 20;
/// Fewest columns of a matrix, and what their number is a multiple of.
const COLUMNS: usize = 64;
/// Rows of activations for a product that is bound by arithmetic.
const PRODUCT_ROWS: usize = 512;
/// Shortest time of a measurement: shorter ones are repeated more often.
const LEAST_TIME: Duration = Duration::from_millis(40);

/// A virtual device, as `--device` takes it.
#[derive(Clone, Debug)]
pub(crate) struct VirtualDevice {
    text: String,
    arg: VirtualArg,
}

impl std::str::FromStr for VirtualDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<DeviceArg>()? {
            DeviceArg::Virtual(arg) if arg.is_modelled() => Err(
                "it computes nothing, and answers would mean nothing: leave mode=modelled and its rates out, or try it in hearth-worker bench"
                    .to_owned(),
            ),
            DeviceArg::Virtual(arg) => Ok(Self {
                text: text.to_owned(),
                arg,
            }),
            DeviceArg::Cpu | DeviceArg::Cuda(_) => Err(
                "it is not a virtual device: write virtual:memory=8Gi; real GPUs are found without a flag"
                    .to_owned(),
            ),
        }
    }
}

impl VirtualDevice {
    /// The text that it was read from.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Lets it stand for a machine's GPUs, as it was measured: its memory is the machine's.
    pub(crate) fn stand_in(&self, measured: GpuProfile, profile: &mut NodeProfileStatus) {
        profile.gpus = vec![measured];
        let available = &mut profile.memory.available_bytes;
        *available = available.saturating_sub(self.arg.memory_bytes());
    }

    /// Why it is lost; `None` while it answers.
    pub(crate) fn lost(&self) -> Option<String> {
        self.arg.lost()
    }

    /// Opens it with as many threads as a rank on a GPU has, and measures it. Of one that is lost nothing is known but that.
    ///
    /// # Errors
    /// An error if its memory is too small for any measurement.
    pub(super) fn measure(&self) -> anyhow::Result<GpuProfile> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let known = GpuProfile {
            uuid: VIRTUAL_UUID.to_owned(),
            name: "virtual".to_owned(),
            memory_bytes: self.arg.memory_bytes(),
            free_bytes: self.arg.memory_bytes(),
            virtual_device: Some(self.text.clone()),
            ..GpuProfile::default()
        };
        if let Some(cause) = self.lost() {
            return Ok(GpuProfile {
                obstacle: Some(format!("it is lost: {cause}")),
                ..known
            });
        }
        let backend = VirtualBackend::new(self.arg.options(CpuOptions {
            isa: None,
            threads: cpus.min(GPU_RANK_THREADS as usize),
            numa_cpus: Vec::new(),
        }))?;
        let measured = rates(&backend, self.arg.memory_bytes(), cpus).map_err(|error| {
            anyhow::anyhow!(
                "{} cannot be measured: {error}\n  give it more memory",
                self.text
            )
        })?;
        Ok(GpuProfile {
            copy_gbps: measured.copy_gbps,
            copy_beside_reads_gbps: measured.copy_beside_reads_gbps,
            read_gbps: measured.read_gbps,
            bf16_gflops: measured.bf16_gflops,
            operation_us: measured.operation_us,
            exchange_us: measured.exchange_us,
            ..known
        })
    }
}

/// Rates of a device that is described by `options`, without those that cannot be measured.
///
/// # Errors
/// [`KernelError::Device`] if its memory is too small for any measurement.
pub(super) fn measured(options: VirtualOptions) -> Result<GpuProfile, KernelError> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let memory_bytes = options.memory_bytes;
    rates(&VirtualBackend::new(options)?, memory_bytes, cpus)
}

/// Rates of a device: copies alone and beside reads of `cpus` threads, reads, products, and small operations.
fn rates(
    backend: &VirtualBackend,
    memory_bytes: u64,
    cpus: usize,
) -> Result<GpuProfile, KernelError> {
    backend.bind_thread()?;
    let bytes = (memory_bytes / MATRIX_SHARE).min(MOST_BYTES) as usize;
    // About square, so that a product does as much arithmetic as it can with what it reads and writes.
    let columns = ((bytes / 2).isqrt() / COLUMNS).max(1) * COLUMNS;
    let rows = (bytes / 2 / columns).max(1);
    // Not zeros, which the system would not give memory.
    let data = vec![1_u8; rows * columns * 2];
    let matrix = HostMatrix::new(data.into(), DType::Bf16, rows, columns, None)?;
    let size = matrix.size_bytes() as f64;
    let copy_gbps = size / copy_seconds(backend, &matrix)? / 1e9;
    let copy_beside_reads_gbps = size / beside_reads(backend, &matrix, cpus)? / 1e9;
    let weight = backend.weight(&matrix)?;
    // So few values that their bytes take no time.
    let few = backend.zeros(1, COLUMNS)?;
    let mut sum = backend.zeros(1, COLUMNS)?;
    let operation_seconds = seconds(backend, || backend.add_assign(&mut sum, &few))?;
    let one = backend.zeros(1, columns)?;
    // Without what any operation takes, but for what is lost in the noise of the measurement.
    let alone = |measured: f64| (measured - operation_seconds).max(measured / 10.0);
    let read_seconds = seconds(backend, || backend.linear(&one, &weight, None).map(drop))?;
    let many = backend.zeros(PRODUCT_ROWS.min(rows.max(1)), columns)?;
    let (product_rows, _) = backend.shape(&many);
    let product_seconds = seconds(backend, || backend.linear(&many, &weight, None).map(drop))?;
    let flops = 2.0 * product_rows as f64 * rows as f64 * columns as f64;
    Ok(GpuProfile {
        copy_gbps: three_digits(copy_gbps),
        copy_beside_reads_gbps: three_digits(copy_beside_reads_gbps),
        read_gbps: three_digits(size / alone(read_seconds) / 1e9),
        bf16_gflops: three_digits(flops / alone(product_seconds) / 1e9),
        operation_us: three_digits(operation_seconds * 1e6),
        exchange_us: three_digits(exchange_seconds(backend, &few)? * 1e6),
        ..GpuProfile::default()
    })
}

/// Seconds to hand a row to a thread of the host and back, as a layer whose experts are there does: the row and the choice
/// come from the device, a row goes back.
fn exchange_seconds(backend: &VirtualBackend, row: &VirtualTensor) -> Result<f64, KernelError> {
    let columns = backend.shape(row).1;
    let (job, jobs) = channel::<Vec<f32>>();
    let (reply, replies) = channel();
    std::thread::scope(|scope| {
        // It ends when nobody can send it any more.
        scope.spawn(move || jobs.into_iter().all(|row| reply.send(row).is_ok()));
        let measured = seconds(backend, || {
            backend.download(row)?;
            let values = backend.download(row)?;
            let values = match job.send(values).ok().and_then(|()| replies.recv().ok()) {
                Some(values) => values,
                None => vec![0.0; columns],
            };
            backend.upload(1, columns, &values).map(drop)
        });
        drop(job);
        measured
    })
}

/// Seconds that a copy of the matrix into a slot takes, one after the other.
fn copy_seconds(backend: &VirtualBackend, matrix: &HostMatrix) -> Result<f64, KernelError> {
    let slots = backend.slots(backend.slot_bytes(matrix), 2)?;
    let mut turn = slots.iter().cycle();
    seconds(backend, || {
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
fn beside_reads(
    backend: &VirtualBackend,
    matrix: &HostMatrix,
    cpus: usize,
) -> Result<f64, KernelError> {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                if hearth_kernels::read_bandwidth_gbps(cpus, MOST_BYTES as usize).is_err() {
                    return;
                }
            }
        });
        let measured = copy_seconds(backend, matrix);
        ends.store(true, Ordering::Relaxed);
        measured
    })
}

/// Seconds by its own clock that one call takes on the device, once it has taken some time in sum.
fn seconds(
    backend: &VirtualBackend,
    mut call: impl FnMut() -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    let mut times = 1_u32;
    loop {
        backend.begin_pass(1)?;
        let begin_ns = backend.elapsed_ns();
        for _ in 0..times {
            call()?;
        }
        backend.finish()?;
        let took = Duration::from_nanos(backend.elapsed_ns() - begin_ns);
        if took >= LEAST_TIME {
            return Ok(took.as_secs_f64() / f64::from(times));
        }
        times = times.saturating_mul(if took < LEAST_TIME / 8 { 8 } else { 2 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_device_is_measured_and_a_real_one_is_none() {
        let device: VirtualDevice = "virtual:memory=4Mi".parse().expect("a virtual device");
        let profile = device.measure().expect("a profile");
        assert_eq!(
            (profile.memory_bytes, profile.free_bytes),
            (4 << 20, 4 << 20)
        );
        assert_eq!(profile.uuid, VIRTUAL_UUID);
        assert_eq!(
            profile.virtual_device.as_deref(),
            Some("virtual:memory=4Mi")
        );
        for rate in [
            profile.copy_gbps,
            profile.copy_beside_reads_gbps,
            profile.read_gbps,
            profile.bf16_gflops,
            profile.operation_us,
            profile.exchange_us,
        ] {
            assert!(rate > 0.0 && rate.is_finite(), "{profile:?}");
        }
        for (wrong, says) in [
            ("cpu", "not a virtual device"),
            ("cuda", "not a virtual device"),
            ("virtual", "needs memory"),
            ("virtual:memory=0", "0 bytes"),
            (
                "virtual:memory=1Gi,mode=modelled,copy=1GB/s,read=1GB/s,compute=1TFLOPS",
                "computes nothing",
            ),
        ] {
            let error = wrong.parse::<VirtualDevice>().expect_err(wrong);
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
