//! Loaded kernels of one device.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use hearth_kernels::{KernelError, affinity};

use super::Variant;
use super::cache::Cache;
use super::nvrtc::Compiler;
use crate::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};
use crate::driver::{Device, check, fault};

/// An entry point, ready to launch. Modules are never unloaded while their device is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(CUfunction);

// SAFETY: a handle; the driver accepts it from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub(crate) fn raw(self) -> CUfunction {
        self.0
    }
}

/// The kernels of a device: compiled or read at first use, then kept.
pub(crate) struct Modules {
    device: Arc<Device>,
    cache: Cache,
    /// Directory of NVRTC if the system does not find it.
    nvrtc: Option<PathBuf>,
    compiler: OnceLock<Result<Compiler, KernelError>>,
    loaded: Mutex<HashMap<Variant, Slot>>,
    /// Compiling threads.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A module that is loaded, unavailable, or being prepared.
type Slot = Arc<OnceLock<Result<Module, KernelError>>>;

struct Module {
    raw: CUmodule,
    /// Functions by name, with the dynamic shared memory allowed for each.
    functions: Mutex<HashMap<&'static str, (Function, u32)>>,
}

// SAFETY: a handle; the driver accepts it from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Modules {
    /// Creates the set; compiled kernels are looked up in `directories` and written to the last one.
    pub(crate) fn new(
        device: &Arc<Device>,
        directories: Vec<PathBuf>,
        nvrtc: Option<PathBuf>,
    ) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::clone(device),
            cache: Cache::new(directories),
            nvrtc,
            compiler: OnceLock::new(),
            loaded: Mutex::default(),
            threads: Mutex::default(),
        })
    }

    /// Returns a variant's entry point `name`, allowed `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the variant cannot be compiled or loaded.
    pub(crate) fn function(
        &self,
        variant: &Variant,
        name: &'static str,
        shared_bytes: u32,
    ) -> Result<Function, KernelError> {
        let slot = self.slot(variant);
        let module = slot
            .get_or_init(|| self.load(variant))
            .as_ref()
            .map_err(KernelError::clone)?;
        let mut functions = lock(&module.functions);
        match functions.get(name) {
            Some((function, allowed)) if *allowed >= shared_bytes => Ok(*function),
            _ => {
                let function = self.entry(module, name, shared_bytes)?;
                functions.insert(name, (function, shared_bytes));
                Ok(function)
            }
        }
    }

    /// Starts preparing variants on separate threads, so that kernels needed soon do not wait for one another.
    pub(crate) fn prepare(self: &Arc<Self>, variants: impl IntoIterator<Item = Variant>) {
        for variant in variants {
            let slot = self.slot(&variant);
            if slot.get().is_some() || Arc::strong_count(&slot) > 2 {
                continue; // Loaded, or being prepared.
            }
            let modules = Arc::clone(self);
            let spawned = std::thread::Builder::new()
                .name(format!("compile {}", variant.file))
                .spawn(move || {
                    if let Err(error) = affinity::bind_as_process() {
                        tracing::debug!(%error, "kernels are compiled on one CPU");
                    }
                    slot.get_or_init(|| modules.load(&variant));
                });
            match spawned {
                Ok(thread) => lock(&self.threads).push(thread),
                Err(error) => {
                    tracing::debug!(%error, "kernels are compiled when they are first used");
                }
            }
        }
    }

    /// Waits until no compilation is running.
    pub(crate) fn wait(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        // A compiler that panicked has left its slot empty: the next user compiles the variant.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn slot(&self, variant: &Variant) -> Slot {
        let mut loaded = lock(&self.loaded);
        match loaded.get(variant) {
            Some(slot) => Arc::clone(slot),
            None => Arc::clone(loaded.entry(variant.clone()).or_default()),
        }
    }

    /// Loads the module from the cache if it has the variant and the driver
    /// accepts it; otherwise compiles and stores it.
    fn load(&self, variant: &Variant) -> Result<Module, KernelError> {
        let architecture = self.device.info.architecture();
        let key = variant.cache_key(&architecture);
        self.device.bind()?;
        if let Some(cubin) = self.cache.read(&key) {
            match load_image(&cubin) {
                Ok(module) => return Ok(module),
                Err(error @ KernelError::DeviceLost { .. }) => return Err(error),
                Err(error) => tracing::warn!(%error, key, "a cached kernel is recompiled"),
            }
        }
        let compiler = self.compiler.get_or_init(|| {
            let driver = crate::driver::version();
            Compiler::new(&architecture, self.nvrtc.as_deref(), driver)
        });
        let cubin = compiler
            .as_ref()
            .map_err(KernelError::clone)?
            .compile(variant)?;
        if let Err(error) = self.cache.write(&key, &cubin) {
            tracing::warn!(%error, "a compiled kernel cannot be cached");
        }
        load_image(&cubin)
    }

    fn entry(
        &self,
        module: &Module,
        name: &str,
        shared_bytes: u32,
    ) -> Result<Function, KernelError> {
        self.device.bind()?;
        let c_name =
            CString::new(name).map_err(|_| fault("an entry point's name holds a zero byte"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and stays loaded; the name is null-terminated.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut raw, module.raw, c_name.as_ptr())
        })?;
        // Without a request a block has 48 KiB, minus the kernel's own static part, so a limit is always requested.
        if shared_bytes > 0 {
            let most = self.device.info.shared_bytes_per_block;
            if shared_bytes > most {
                return Err(fault(format!(
                    "kernel {name} needs {shared_bytes} bytes of shared memory, and this GPU gives a block {most}"
                )));
            }
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            check("cuFuncSetAttribute", unsafe {
                sys::cuFuncSetAttribute(raw, attribute, shared_bytes as i32)
            })?;
        }
        Ok(Function(raw))
    }
}

/// Passes an image to the driver. A context must be current.
fn load_image(cubin: &[u8]) -> Result<Module, KernelError> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the image is whole, as its hash says or the compiler just made it; the out-pointer is valid.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast())
    })?;
    Ok(Module {
        raw,
        functions: Mutex::default(),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
