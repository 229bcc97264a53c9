//! `hearth-worker cuda-compile`: compiles kernels for an architecture ahead of their first use. Needs NVRTC but no
//! GPU.

use std::path::PathBuf;

use clap::Args;
use hearth_cuda::compile_all;

use crate::cli::NvrtcArgs;
use crate::environment::Environment;
use crate::logging::print_data;

/// Arguments of `cuda-compile`.
#[derive(Args)]
pub(crate) struct CudaCompileArgs {
    /// Architectures, comma separated: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40), sm_90a (H100, H200), sm_120a (RTX 50)
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required = true)]
    arch: Vec<String>,
    /// Directory that receives the compiled kernels; workers read it with HEARTH_KERNELS or as --kernel-cache
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    nvrtc: NvrtcArgs,
}

/// Compiles and prints the results.
pub(crate) fn run(args: &CudaCompileArgs, environment: &Environment) -> anyhow::Result<()> {
    let nvrtc = args.nvrtc.directory(environment);
    for arch in &args.arch {
        let began = std::time::Instant::now();
        let report = compile_all(&args.out, arch, nvrtc.as_deref())?;
        print_data(&format!(
            "{arch}: {} kernels, {:.1} MB, {} compiled in {:.1} s\n",
            report.kernels,
            report.bytes as f64 / 1e6,
            report.compiled,
            began.elapsed().as_secs_f64()
        ))?;
    }
    Ok(())
}
