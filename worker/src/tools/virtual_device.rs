//! Measures a virtual device, which stands for a GPU in a profile: its memory and its rates.

use hearth_crds::{GPU_RANK_THREADS, GpuProfile, NodeProfileStatus, VIRTUAL_UUID, virtual_uuid};
use hearth_kernels::{CpuOptions, KernelError};
use hearth_virtual::{VirtualBackend, VirtualOptions};

use super::rates;
use crate::device::{DeviceArg, VirtualArg};
use crate::virtual_device::COUNT;

/// Most virtual devices of a node.
const MOST_DEVICES: u32 = 8;

/// Virtual devices that stand for a node's GPUs: as many equal ones as `count=` says, each as `--device` takes it.
#[derive(Clone, Debug)]
pub(crate) struct VirtualDevice {
    /// One of them.
    text: String,
    arg: VirtualArg,
    count: u32,
}

/// Takes `count=` out of a device's properties.
fn without_count(text: &str) -> Result<(String, u32), String> {
    let Some((kind, properties)) = text.split_once(':') else {
        return Ok((text.to_owned(), 1));
    };
    let mut counts = Vec::new();
    let mut rest = Vec::new();
    for property in properties.split(',') {
        match property.split_once('=').unwrap_or((property, "")) {
            (COUNT, count) => counts.push(count),
            _ => rest.push(property),
        }
    }
    let text = format!("{kind}:{}", rest.join(","));
    match counts[..] {
        [] => Ok((text, 1)),
        [count] => match count.parse() {
            Ok(count @ 1..=MOST_DEVICES) => Ok((text, count)),
            _ => Err(format!(
                "count={count}: write 1 to {MOST_DEVICES} equal devices, as in virtual:memory=8Gi,count=2"
            )),
        },
        _ => Err("count is written twice: write it once".to_owned()),
    }
}

impl std::str::FromStr for VirtualDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (text, count) = without_count(text)?;
        match text.parse::<DeviceArg>()? {
            DeviceArg::Virtual(arg) if arg.is_modelled() => Err(
                "it computes nothing, and answers would mean nothing: leave mode=modelled and its rates out, or try it in hearth-worker bench"
                    .to_owned(),
            ),
            DeviceArg::Virtual(arg) => Ok(Self { text, arg, count }),
            DeviceArg::Cpu | DeviceArg::Cuda(_) => Err(
                "it is not a virtual device: write virtual:memory=8Gi; real GPUs are found without a flag"
                    .to_owned(),
            ),
        }
    }
}

impl VirtualDevice {
    /// One of them, as `--device` takes it.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// UUIDs of all of them.
    pub(crate) fn uuids(&self) -> impl Iterator<Item = String> {
        (0..self.count).map(virtual_uuid)
    }

    /// Lets them stand for a machine's GPUs, as one of them was measured: their memory is the machine's.
    pub(crate) fn stand_in(&self, measured: &GpuProfile, profile: &mut NodeProfileStatus) {
        let device = |uuid| GpuProfile {
            uuid,
            ..measured.clone()
        };
        profile.gpus = self.uuids().map(device).collect();
        let taken = self.arg.memory_bytes().saturating_mul(self.count.into());
        let memory = &mut profile.memory;
        let least = memory.least_available_bytes.as_mut();
        for available in least.into_iter().chain([&mut memory.available_bytes]) {
            *available = available.saturating_sub(taken);
        }
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
        let measured = rates::of_virtual(&backend, self.arg.memory_bytes()).map_err(|error| {
            anyhow::anyhow!(
                "{} cannot be measured: {error}\n  give it more memory",
                self.text
            )
        })?;
        let mut profile = known;
        profile.take_rates(&measured);
        Ok(profile)
    }
}

/// Rates of a device that is described by `options`, without those that cannot be measured.
///
/// # Errors
/// [`KernelError::Device`] if its memory is too small for any measurement.
pub(super) fn measured(options: VirtualOptions) -> Result<GpuProfile, KernelError> {
    let memory_bytes = options.memory_bytes;
    rates::of_virtual(&VirtualBackend::new(options)?, memory_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_equal_devices_have_names_of_their_own_and_take_their_memory_from_the_machines() {
        let devices: VirtualDevice = "virtual:memory=4Mi,count=3".parse().expect("devices");
        assert_eq!(devices.text(), "virtual:memory=4Mi");
        let mut profile = NodeProfileStatus::default();
        profile.memory.available_bytes = 20 << 20;
        profile.memory.least_available_bytes = Some(16 << 20);
        let one = GpuProfile {
            memory_bytes: 4 << 20,
            ..GpuProfile::default()
        };
        devices.stand_in(&one, &mut profile);
        let uuids: Vec<&str> = profile.gpus.iter().map(|gpu| &*gpu.uuid).collect();
        assert_eq!(uuids, ["VIRTUAL-0", "VIRTUAL-1", "VIRTUAL-2"]);
        assert_eq!(profile.memory.available_bytes, 8 << 20);
        assert_eq!(profile.memory.least_available_bytes, Some(4 << 20));
        for (wrong, says) in [
            ("virtual:memory=4Mi,count=0", "1 to 8"),
            ("virtual:count=x,memory=4Mi", "count=x"),
            ("virtual:memory=4Mi,count", "count=: write 1 to 8"),
            ("virtual:memory=4Mi,number=2", "and count for plans"),
            ("virtual:count=1,count=2,memory=4Mi", "twice"),
        ] {
            let error = wrong.parse::<VirtualDevice>().expect_err(wrong);
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

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
            profile.fp8_gflops,
            profile.f16_gflops,
            profile.f32_weights_gflops,
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
