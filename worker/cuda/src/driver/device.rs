//! GPUs: their properties, and the context of the one that computes.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_kernels::KernelError;

use super::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute};
use super::{check, fault, init};

/// Minimum compute capability whose tensor cores support bf16 together with `cp.async` (Ampere).
const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// Properties of a GPU, as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index in the driver's list.
    pub ordinal: usize,
    /// Name, such as `NVIDIA GeForce RTX 4090`.
    pub name: String,
    /// `GPU-` and 32 hexadecimal digits in groups, as `nvidia-smi -L` prints it.
    pub uuid: String,
    /// Compute capability: (8, 9) is sm_89.
    pub capability: (u32, u32),
    /// Size of its memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum bytes of shared memory that one block may request.
    pub shared_bytes_per_block: u32,
    /// Whether it can read host pages that are read-only for this process.
    pub registers_read_only: bool,
}

impl DeviceInfo {
    /// NVRTC's name of the architecture, with the suffix if the hardware has
    /// architecture-specific instructions: `sm_90a`.
    pub fn architecture(&self) -> String {
        let (major, minor) = self.capability;
        let suffix = if major >= 9 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }
}

/// Lists all GPUs that the driver sees, in its order.
///
/// # Errors
/// [`KernelError::Device`] with the remedy if there is no driver or no GPU.
pub fn devices() -> Result<Vec<DeviceInfo>, KernelError> {
    init()?;
    let mut count = 0;
    // SAFETY: the driver is ready and the out-pointer valid.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&raw mut count)
    })?;
    (0..count).map(read).collect()
}

fn read(ordinal: i32) -> Result<DeviceInfo, KernelError> {
    let mut device: CUdevice = 0;
    let mut name = [0 as c_char; 128];
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    let mut memory_bytes = 0_usize;
    // SAFETY: the driver is ready; every out-pointer is valid for what is written, the name's length is given.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
        check(
            "cuDeviceGetName",
            sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device),
        )?;
        check(
            "cuDeviceGetUuid",
            sys::cuDeviceGetUuid_v2(&raw mut uuid, device),
        )?;
        check(
            "cuDeviceTotalMem",
            sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, device),
        )?;
    }
    name[127] = 0;
    // SAFETY: the last byte is zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let ask = |what| attribute(device, what);
    Ok(DeviceInfo {
        ordinal: ordinal as usize,
        name: name.to_string_lossy().into_owned(),
        uuid: uuid_text(uuid.bytes.map(|b| b as u8)),
        capability: (
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes: memory_bytes as u64,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: ask(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
        registers_read_only: ask(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)?
            != 0,
    })
}

fn attribute(device: CUdevice, what: Attribute) -> Result<u32, KernelError> {
    let mut value = 0;
    // SAFETY: the driver is ready, the device its own, the out-pointer valid.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&raw mut value, what, device)
    })?;
    Ok(value.max(0) as u32)
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    let (a, b, c, d, e) = (
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    );
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// A GPU with its primary context, which lives as long as this value.
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    device: CUdevice,
    context: CUcontext,
    /// Times that a thread has waited for a stream or an event.
    waits: AtomicU64,
}

// SAFETY: a context may be used from any thread that has made it current; the handles are plain pointers.
unsafe impl Send for Device {}
// SAFETY: as above; the driver itself is thread-safe.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the GPU with this UUID (with or without `GPU-`, a prefix suffices); `None`: the first that is new enough.
    pub(crate) fn open(uuid: Option<&str>) -> Result<Self, KernelError> {
        let info = choose(devices()?, uuid)?;
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is ready, the ordinal its own, the out-pointers valid.
        unsafe {
            check(
                "cuDeviceGet",
                sys::cuDeviceGet(&raw mut device, info.ordinal as i32),
            )?;
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&raw mut context, device),
            )?;
        }
        Ok(Self {
            info,
            device,
            context,
            waits: AtomicU64::new(0),
        })
    }

    /// Directs the calling thread's driver calls to this GPU.
    pub(crate) fn bind(&self) -> Result<(), KernelError> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.context)
        })
    }

    /// Number of times that a thread has waited for a stream or an event.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Name of the device in errors.
    pub(crate) fn label(&self) -> String {
        format!("cuda:{}", self.info.uuid)
    }

    /// Bytes of memory that are currently free.
    pub(crate) fn free_bytes(&self) -> Result<u64, KernelError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, the out-pointers valid.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok(free as u64)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained by `open`. An error here cannot be handled.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Chooses the requested GPU, or the first that is new enough.
fn choose(all: Vec<DeviceInfo>, uuid: Option<&str>) -> Result<DeviceInfo, KernelError> {
    let seen = all
        .iter()
        .map(|info| {
            format!(
                "{} ({}, sm_{}{})",
                info.uuid, info.name, info.capability.0, info.capability.1
            )
        })
        .collect::<Vec<_>>()
        .join(", ");
    let found = match uuid {
        None => all
            .into_iter()
            .find(|info| info.capability >= LEAST_CAPABILITY),
        Some(uuid) => {
            let wanted = format!("GPU-{}", uuid.trim_start_matches("GPU-")).to_ascii_lowercase();
            let is_it = |info: &DeviceInfo| info.uuid.to_ascii_lowercase().starts_with(&wanted);
            let mut matching = all.into_iter().filter(is_it);
            let found = matching.next();
            if matching.next().is_some() {
                return Err(fault(format!(
                    "several GPUs have a UUID that begins with {uuid}: {seen}\n  write it in full"
                )));
            }
            found
        }
    };
    match found {
        Some(info) if info.capability >= LEAST_CAPABILITY => Ok(info),
        Some(info) => Err(fault(format!(
            "{} ({}) has compute capability {}.{}, and 8.0 is needed\n  use a GPU of the RTX 30 series or newer, or --device cpu",
            info.uuid, info.name, info.capability.0, info.capability.1
        ))),
        None => Err(fault(match uuid {
            None => format!(
                "no GPU has compute capability 8.0 or newer; available: {seen}\n  use a GPU of the RTX 30 series or newer, or compute on the CPU with --device cpu"
            ),
            Some(uuid) => format!(
                "no GPU has the UUID {uuid}; available: {seen}\n  name one of those with --device cuda:UUID (not by its number), or compute on the CPU with --device cpu"
            ),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, capability: (u32, u32)) -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "NVIDIA Test".to_owned(),
            uuid: uuid.to_owned(),
            capability,
            memory_bytes: 1 << 30,
            multiprocessors: 8,
            shared_bytes_per_block: 99 << 10,
            registers_read_only: true,
        }
    }

    #[test]
    fn a_gpu_is_chosen_by_the_beginning_of_its_uuid() {
        let all = || {
            vec![
                gpu("GPU-11aa", (7, 5)),
                gpu("GPU-22bb", (8, 9)),
                gpu("GPU-22cc", (9, 0)),
            ]
        };
        let chosen = |uuid| choose(all(), uuid).map(|info| info.uuid);
        assert_eq!(chosen(None).unwrap(), "GPU-22bb");
        assert_eq!(chosen(Some("22c")).unwrap(), "GPU-22cc");
        assert_eq!(chosen(Some("GPU-22BB")).unwrap(), "GPU-22bb");
        let text = |uuid| chosen(uuid).unwrap_err().to_string();
        assert!(text(Some("22")).contains("write it in full"));
        assert!(text(Some("33")).contains("no GPU has the UUID 33; available: GPU-11aa"));
        assert!(text(Some("11aa")).contains("compute capability 7.5, and 8.0 is needed"));
    }

    #[test]
    fn architectures_have_their_suffix_where_the_hardware_has_instructions_of_its_own() {
        let names = [(8, 0), (8, 9), (9, 0), (12, 0)].map(|c| gpu("", c).architecture());
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_120a"]);
    }

    #[test]
    fn a_uuid_is_written_as_the_tools_write_it() {
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
