//! GPU data from NVIDIA's management library (NVML). The library is part of the driver and loaded at run time: a
//! machine without it has no GPUs.

use std::ffi::OsStr;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// The driver's name for its library.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";
/// `MigMode::current` of a GPU that is partitioned into instances.
const MIG_IS_ON: u32 = 1;
/// Time between two readings of the GPUs' power.
const POWER_PERIOD: Duration = Duration::from_secs(10);
/// Time between two attempts to open a library that has no GPUs to read.
const OPEN_PERIOD: Duration = Duration::from_secs(60);
/// Age from which on a reading says nothing of the present: the driver hangs, or is gone.
const POWER_AGE: Duration = Duration::from_secs(60);

/// Data of one GPU; anything that the library does not report is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GpuReading {
    pub uuid: String,
    pub name: String,
    /// PCI address, such as `00000000:17:00.0`.
    pub pci_bus_id: Option<String>,
    pub memory: Option<MemoryReading>,
    pub compute_capability: Option<(i32, i32)>,
    pub pcie: PcieReading,
    pub power_limit_milliwatts: Option<u32>,
    pub max_memory_clock_mhz: Option<u32>,
    pub memory_bus_bits: Option<u32>,
    /// Highest clock of the multiprocessors.
    pub max_sm_clock_mhz: Option<u32>,
    /// Number of multiprocessors times their float32 lanes.
    pub cores: Option<u32>,
    /// Whether the GPU is partitioned into instances, so that no process can use it as a whole.
    pub is_partitioned: bool,
}

/// Memory of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryReading {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// PCIe link of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PcieReading {
    pub generation: Option<u32>,
    pub width: Option<u32>,
    pub max_generation: Option<u32>,
    pub max_width: Option<u32>,
}

/// Reason nothing can be read, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvmlUnavailable {
    /// No library, no driver or no GPU, as on most machines.
    NoGpus(String),
    /// GPUs should be present but cannot be read: the user can fix it.
    Trouble(String),
}

/// Opens the driver's library, for what else than a profile it is needed.
///
/// # Errors
/// It is missing, or cannot be used.
pub fn open_nvml() -> Result<Nvml, NvmlUnavailable> {
    open(LIBRARY)
}

/// Power of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuPower {
    /// UUID as of the driver.
    pub uuid: String,
    /// The limit in force, in milliwatts, if the GPU says it.
    pub limit_milliwatts: Option<u32>,
    /// What the GPU takes, in milliwatts, if it says so.
    pub milliwatts: Option<u32>,
}

/// The last reading of the power, and when it was taken.
static POWER: Mutex<Option<(Instant, Vec<GpuPower>)>> = Mutex::new(None);

/// The power of every GPU that says what it is, in PCI bus order, as of the last seconds; empty on a machine without any, and where
/// nothing was read yet or within a minute. Does not wait for the driver: from the first call on, a thread reads it.
pub fn gpu_power() -> Vec<GpuPower> {
    static READER: Once = Once::new();
    READER.call_once(|| {
        let reader = thread::Builder::new().name("gpu-power".to_owned());
        // Without a thread there is nothing to say.
        let _ = reader.spawn(keep_reading);
    });
    let last = POWER.lock().unwrap_or_else(PoisonError::into_inner);
    let last = last.as_ref().filter(|(at, _)| at.elapsed() < POWER_AGE);
    last.map(|(_, gpus)| gpus.clone()).unwrap_or_default()
}

/// Reads the power for ever. The library stays open: without persistence mode, each opening initialises idle GPUs anew.
fn keep_reading() {
    let mut opened: Option<Nvml> = None;
    loop {
        let nvml = opened.take().or_else(|| open_nvml().ok());
        let gpus = nvml.as_ref().map(power).unwrap_or_default();
        if gpus.is_empty() {
            // A driver that was replaced may answer the next time.
            drop(nvml);
            thread::sleep(OPEN_PERIOD);
            continue;
        }
        *POWER.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), gpus));
        opened = nvml;
        thread::sleep(POWER_PERIOD);
    }
}

fn power(nvml: &Nvml) -> Vec<GpuPower> {
    let devices = 0..nvml.device_count().unwrap_or(0);
    let read = devices.filter_map(|index| {
        let device = nvml.device_by_index(index).ok()?;
        Some(GpuPower {
            uuid: device.uuid().ok()?,
            limit_milliwatts: device.power_management_limit().ok(),
            milliwatts: device.power_usage().ok(),
        })
    });
    read.collect()
}

fn open(library: &str) -> Result<Nvml, NvmlUnavailable> {
    let nvml = Nvml::builder().lib_path(OsStr::new(library)).init();
    nvml.map_err(|error| silence(library, &error))
}

/// Reads every GPU, in PCI bus order.
pub(crate) fn read(library: &str) -> Result<Vec<GpuReading>, NvmlUnavailable> {
    let nvml = open(library)?;
    let count = nvml
        .device_count()
        .map_err(|error| silence(library, &error))?;
    if count == 0 {
        return Err(NvmlUnavailable::NoGpus(format!("{library} lists none")));
    }
    (0..count)
        .map(|index| {
            let device = nvml.device_by_index(index);
            device.and_then(|device| of_device(&device))
        })
        .collect::<Result<_, _>>()
        .map_err(|error| silence(library, &error))
}

fn of_device(device: &Device<'_>) -> Result<GpuReading, NvmlError> {
    let memory = device.memory_info().ok().map(|info| MemoryReading {
        total_bytes: info.total,
        free_bytes: info.free,
    });
    let capability = device.cuda_compute_capability().ok();
    Ok(GpuReading {
        uuid: device.uuid()?,
        name: device.name()?,
        pci_bus_id: device.pci_info().ok().map(|info| info.bus_id),
        memory,
        compute_capability: capability.map(|of| (of.major, of.minor)),
        pcie: PcieReading {
            generation: device.current_pcie_link_gen().ok(),
            width: device.current_pcie_link_width().ok(),
            max_generation: device.max_pcie_link_gen().ok(),
            max_width: device.max_pcie_link_width().ok(),
        },
        power_limit_milliwatts: device.power_management_limit().ok(),
        max_memory_clock_mhz: device.max_clock_info(Clock::Memory).ok(),
        memory_bus_bits: device.memory_bus_width().ok(),
        max_sm_clock_mhz: device.max_clock_info(Clock::SM).ok(),
        cores: device.num_cores().ok(),
        is_partitioned: device
            .mig_mode()
            .is_ok_and(|mode| mode.current == MIG_IS_ON),
    })
}

/// Classifies an error by its meaning for a profile.
fn silence(library: &str, error: &NvmlError) -> NvmlUnavailable {
    match error {
        NvmlError::LibloadingError(_)
        | NvmlError::LibraryNotFound
        | NvmlError::DriverNotLoaded
        | NvmlError::NotFound => NvmlUnavailable::NoGpus(format!("{library}: {error}")),
        NvmlError::LibRmVersionMismatch => NvmlUnavailable::Trouble(format!(
            "GPUs cannot be used: {library} and the loaded NVIDIA driver are of different versions \
             (driver/library version mismatch): restart the machine, or load the driver that was installed"
        )),
        error => NvmlUnavailable::Trouble(format!("GPUs cannot be read: {library}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_has_no_gpus() {
        let began = std::time::Instant::now();
        let silence = read("libnvidia-ml-that-is-not-there.so.1");
        assert!(
            matches!(silence, Err(NvmlUnavailable::NoGpus(_))),
            "{silence:?}"
        );
        assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    }

    #[test]
    fn only_what_a_person_can_act_on_is_trouble() {
        for quiet in [NvmlError::DriverNotLoaded, NvmlError::NotFound] {
            assert!(matches!(
                silence(LIBRARY, &quiet),
                NvmlUnavailable::NoGpus(_)
            ));
        }
        let NvmlUnavailable::Trouble(mismatch) = silence(LIBRARY, &NvmlError::LibRmVersionMismatch)
        else {
            panic!("a mismatch is no machine without GPUs");
        };
        assert!(mismatch.contains("version mismatch"), "{mismatch}");
        assert!(matches!(
            silence(LIBRARY, &NvmlError::NoPermission),
            NvmlUnavailable::Trouble(_)
        ));
    }
}
