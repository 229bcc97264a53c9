//! Backends and engines for these tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_cuda::{Activations, CudaBackend, CudaOptions};
use hearth_engine::{Engine, EngineOptions};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::trace::Trace;
use hearth_kernels::{CpuBackend, CpuOptions};
use hearth_model::{Model, modules};
use hearth_residency::Resident;

use crate::support::options;

/// The GPU, or the host model's GPU.
pub(crate) fn gpu() -> Arc<CudaBackend> {
    gpu_with(Activations::F32)
}

pub(crate) fn gpu_with(activations: Activations) -> Arc<CudaBackend> {
    open(activations, None)
}

/// The GPU with unrounded activations; `trace` receives what its streams do.
pub(crate) fn gpu_traced(trace: &Arc<Trace>) -> Arc<CudaBackend> {
    open(Activations::F32, Some(Arc::clone(trace)))
}

fn open(activations: Activations, trace: Option<Arc<Trace>>) -> Arc<CudaBackend> {
    let kernels = if std::env::var_os("HEARTH_TEST_GPU").is_none() {
        hearth_cuda_host::install();
        hearth_cuda_host::kernel_cache()
    } else {
        let home = PathBuf::from(std::env::var_os("HOME").unwrap());
        home.join(".cache/hearth/kernels")
    };
    let options = CudaOptions {
        activations,
        trace,
        budget_bytes: Some(256 << 20),
        kernel_cache: vec![kernels],
        ..CudaOptions::default()
    };
    Arc::new(CudaBackend::new(options).unwrap())
}

pub(crate) fn cpu() -> Arc<CpuBackend> {
    let options = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    Arc::new(CpuBackend::new(options).unwrap())
}

pub(crate) fn model<B: Backend>(dir: &Path, backend: Arc<B>) -> Model<B> {
    let config = ModelConfig::read(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = modules(&config).unwrap();
    let residency = Resident::open(&checkpoint, specs, backend.clone()).unwrap();
    Model::new(config, backend, Arc::new(residency)).unwrap()
}

pub(crate) fn engine<B: Backend>(
    dir: &Path,
    backend: Arc<B>,
    change: &dyn Fn(&mut EngineOptions),
) -> Engine {
    Engine::start(model(dir, backend), options(change)).unwrap()
}
