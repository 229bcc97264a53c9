//! Writes the archives of both container images and prints their sizes.
//!
//!     hearth-images OPERATOR_PROGRAM WORKER_PROGRAM KERNELS OUTPUT_DIRECTORY REGISTRY
//!
//! KERNELS is a directory filled by `hearth-worker cuda-compile`.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use hearth_tests::image::{Image, Program};

const MIB: u64 = 1 << 20;
/// Size limit of the operator's image on a node: it should fit anywhere.
const OPERATOR_LIMIT_BYTES: u64 = 25 * MIB;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operator, worker, kernels, output, registry] = &arguments[..] else {
        eprintln!(
            "usage: hearth-images OPERATOR_PROGRAM WORKER_PROGRAM KERNELS OUTPUT_DIRECTORY REGISTRY"
        );
        return ExitCode::from(2);
    };
    let kernels = Path::new(kernels);
    match write(operator, worker, kernels, Path::new(output), registry) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn write(
    operator: &str,
    worker: &str,
    kernels: &Path,
    output: &Path,
    registry: &str,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(output).with_context(|| output.display().to_string())?;
    for (program, built, name, limit) in [
        (
            Program::Operator,
            operator,
            "hearth",
            Some(OPERATOR_LIMIT_BYTES),
        ),
        (Program::Worker, worker, "hearth-worker", None),
    ] {
        let reference = format!("{registry}/{name}:{}", env!("CARGO_PKG_VERSION"));
        let archive = output.join(format!("{name}.tar"));
        let mut image = Image::of(program, &reference, Path::new(built))?;
        if program == Program::Worker {
            image = image.directory(kernels, "/usr/share/hearth/kernels")?;
        }
        let sizes = image.compressed().write(&archive)?;
        let mib = |bytes: u64| bytes as f64 / MIB as f64;
        println!(
            "{}  {reference}  {:.1} MiB, {:.1} MiB on a node",
            archive.display(),
            mib(sizes.archive),
            mib(sizes.unpacked)
        );
        if limit.is_some_and(|limit| sizes.unpacked > limit) {
            bail!(
                "{name} takes {:.1} MiB on a node, more than {:.0} MiB\n  find what grew: a dependency or a feature",
                mib(sizes.unpacked),
                mib(OPERATOR_LIMIT_BYTES)
            );
        }
    }
    Ok(())
}
