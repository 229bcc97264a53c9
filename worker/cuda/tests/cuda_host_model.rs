//! The host model's checks: each planted error is caught with the message that
//! its README promises, and sound kernels pass.
//!
//! An error makes the device unusable for the rest of the process, as on hardware, so each kernel runs in its own
//! process: this binary again, with the one ignored test.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use cudarc::driver::sys::{self as driver, CUdeviceptr, CUfunction, CUresult};
use cudarc::nvrtc::sys::{self as nvrtc, nvrtcResult};

/// Threads per block, and floats in each buffer.
const THREADS: usize = 64;
/// Environment variable with the kernel for the process that runs it, with blocks,
/// threads and bytes of dynamic shared memory.
const CASE: &str = "HEARTH_PLANTED_KERNEL";
/// Exit status of that process if the error was reported, and reported again by the next call.
const CAUGHT: i32 = 3;

/// A kernel of planted.cu and the possible beginnings of its error report; empty: it is sound.
struct Planted {
    kernel: &'static str,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    begins: &'static [&'static str],
}

const fn planted(kernel: &'static str, begins: &'static [&'static str]) -> Planted {
    Planted {
        kernel,
        blocks: 1,
        threads: THREADS as u32,
        shared_bytes: 0,
        begins,
    }
}

/// Describes a kernel that runs on the tensor cores of a warpgroup.
const fn warpgroup(kernel: &'static str, begins: &'static [&'static str]) -> Planted {
    Planted {
        threads: 128,
        shared_bytes: 25 * 1024,
        ..planted(kernel, begins)
    }
}

/// Reports that are both right if the order of threads decides which comes first.
const RACE: &[&str] = &["shared memory race", "read of unwritten shared memory"];

const KERNELS: [Planted; 34] = [
    planted("out_of_bounds_read", &["out of bounds"]),
    planted("out_of_bounds_write", &["out of bounds"]),
    planted("read_of_unwritten", &["read of unwritten memory"]),
    planted("shared_out_of_bounds", &["shared memory out of bounds"]),
    Planted {
        shared_bytes: 4 * THREADS as u32,
        ..planted("dynamic_out_of_bounds", &["shared memory out of bounds"])
    },
    planted("shared_unwritten", &["read of unwritten shared memory"]),
    planted("shared_race", RACE),
    planted("shared_race_sound", &[]),
    planted("shared_reuse", &["shared memory race"]),
    planted("missing_syncwarp", RACE),
    planted("missing_syncwarp_sound", &[]),
    planted("syncwarp_across_warps", RACE),
    planted("missing_cp_async_wait", &["cp.async not waited for"]),
    planted(
        "missing_cp_async_barrier",
        &[
            "cp.async not waited for",
            "shared memory race",
            "read of unwritten shared memory",
        ],
    ),
    planted("cp_async_sound", &[]),
    planted("divergent_barrier", &["divergent barrier"]),
    planted("two_barriers", &["divergent barrier"]),
    planted("missed_named_barrier", &["divergent barrier"]),
    planted("two_named_barriers", &["divergent barrier"]),
    planted("named_barrier_sound", &[]),
    planted("named_barrier_too_early", &["shared memory race"]),
    planted("divergent_shuffle", &["divergent warp operation"]),
    planted("global_race", &["global memory race"]),
    planted("global_race_sound", &[]),
    Planted {
        blocks: 2,
        ..planted("race_between_blocks", &["global memory race"])
    },
    planted("misaligned", &["misaligned address"]),
    planted("use_after_free", &["use of freed memory"]),
    planted("partial_masks_sound", &[]),
    warpgroup("missing_proxy_fence", &["wgmma without fence.proxy.async"]),
    warpgroup("missing_wgmma_fence", &["wgmma without wgmma.fence"]),
    warpgroup("wgmma_operand_overwritten", &["shared memory race"]),
    warpgroup("wgmma_sound", &[]),
    warpgroup("wgmma_transposed_overwritten", &["shared memory race"]),
    warpgroup("wgmma_transposed_sound", &[]),
];

#[test]
fn every_planted_error_is_caught_and_every_sound_kernel_passes() {
    for planted in &KERNELS {
        // In the usual order of threads, and in two others.
        for seed in ["", "1", "2"] {
            let (status, report) = run_apart(planted, seed);
            let what = format!("{}, seed {seed:?}: {status:?}\n{report}", planted.kernel);
            if planted.begins.is_empty() {
                assert!(status == Some(0) && report.is_empty(), "{what}");
                continue;
            }
            assert_eq!(status, Some(CAUGHT), "{what}");
            let begins = |words: &&str| report.starts_with(*words);
            assert!(planted.begins.iter().any(begins), "{what}");
            let place = format!(": kernel {}, block (", planted.kernel);
            assert!(report.contains(&place), "{what}");
        }
    }
}

#[test]
fn every_kernel_of_the_file_is_tried() {
    let source = std::fs::read_to_string(selftest()).unwrap();
    let entries = source
        .lines()
        .filter_map(|line| line.strip_prefix("extern \"C\" __global__ void "));
    let mut names: Vec<&str> = entries.filter_map(|rest| rest.split('(').next()).collect();
    let mut tried: Vec<&str> = KERNELS.iter().map(|planted| planted.kernel).collect();
    names.sort_unstable();
    tried.sort_unstable();
    assert_eq!(names, tried);
}

#[test]
fn the_model_passes_its_own_tests() {
    let home = std::env::var_os("HOME").map_or_else(|| "/tmp".into(), PathBuf::from);
    let cache =
        std::env::var_os("HEARTH_CACHE").map_or_else(|| home.join(".cache/hearth"), PathBuf::from);
    let python = cache.join("py/bin/python");
    assert!(
        python.exists(),
        "{} is not there: run `make test`, whose bootstrap installs it",
        python.display()
    );
    for script in ["test_driver.py", "test_streams.py", "test_operations.py"] {
        let output = Command::new(&python)
            .arg(selftest().with_file_name(script))
            .arg(hearth_cuda_host::libraries())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success(), "{script}: {said}");
    }
}

/// Runs the kernel in its own process; returns the exit status and the model's report.
fn run_apart(planted: &Planted, seed: &str) -> (Option<i32>, String) {
    let name = format!(
        "hearth-planted-{}-{}-{seed}",
        std::process::id(),
        planted.kernel
    );
    let report = std::env::temp_dir().join(name);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_kernel_by_itself", "--ignored"])
        .env(
            CASE,
            format!(
                "{} {} {} {}",
                planted.kernel, planted.blocks, planted.threads, planted.shared_bytes
            ),
        )
        .env("HEARTH_HOST_MODEL_CAPABILITY", "9.0")
        .env("HEARTH_HOST_MODEL_CHECKS", "1")
        .env("HEARTH_HOST_MODEL_REPORT", &report);
    if seed.is_empty() {
        command.env_remove("HEARTH_HOST_MODEL_SEED");
    } else {
        command.env("HEARTH_HOST_MODEL_SEED", seed);
    }
    let status = command.output().unwrap().status.code();
    let text = std::fs::read_to_string(&report).unwrap_or_default();
    // A sound kernel leaves no report.
    let _ = std::fs::remove_file(report);
    (status, text)
}

#[test]
#[ignore = "one kernel in a process of its own: the test above starts it"]
fn a_kernel_by_itself() {
    let case = std::env::var(CASE).unwrap();
    let [kernel, blocks, threads, shared_bytes] =
        <[&str; 4]>::try_from(case.split(' ').collect::<Vec<_>>())
            .ok()
            .unwrap();
    hearth_cuda_host::install();
    let function = load(kernel);
    // SAFETY: the driver is ready since `load`; the buffers and arguments are
    // those described at the head of planted.cu.
    let (first, again) = unsafe {
        let (out, input) = (allocate(), allocate());
        let values = [1.0_f32; THREADS];
        check(driver::cuMemcpyHtoD_v2(
            input,
            values.as_ptr().cast(),
            THREADS * 4,
        ));
        if kernel == "use_after_free" {
            check(driver::cuMemFree_v2(input));
        }
        let n = THREADS as i32;
        let mut arguments: [*mut c_void; 3] = [
            (&raw const out).cast_mut().cast(),
            (&raw const input).cast_mut().cast(),
            (&raw const n).cast_mut().cast(),
        ];
        check(driver::cuLaunchKernel(
            function,
            blocks.parse().unwrap(),
            1,
            1,
            threads.parse().unwrap(),
            1,
            1,
            shared_bytes.parse().unwrap(),
            ptr::null_mut(),
            arguments.as_mut_ptr(),
            ptr::null_mut(),
        ));
        (driver::cuCtxSynchronize(), driver::cuCtxSynchronize())
    };
    if first == CUresult::CUDA_SUCCESS {
        return;
    }
    assert_eq!(first, again, "the error stays");
    std::process::exit(CAUGHT);
}

fn allocate() -> CUdeviceptr {
    let mut address = 0;
    // SAFETY: the driver is ready, the out-pointer valid.
    check(unsafe { driver::cuMemAlloc_v2(&raw mut address, THREADS * 4) });
    address
}

/// The entry point, on the model's first device.
fn load(kernel: &str) -> CUfunction {
    let image = compile();
    let name = CString::new(kernel).unwrap();
    let mut device = 0;
    let mut told: [c_char; 64] = [0; 64];
    let (mut context, mut module, mut function) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: all out-pointers are valid, and the image and the name live through the calls.
    unsafe {
        check(driver::cuInit(0));
        check(driver::cuDeviceGet(&raw mut device, 0));
        check(driver::cuDeviceGetName(told.as_mut_ptr(), 64, device));
        let told = CStr::from_ptr(told.as_ptr()).to_str().unwrap();
        assert!(told.contains("host model"), "ran on {told}");
        check(driver::cuDevicePrimaryCtxRetain(&raw mut context, device));
        check(driver::cuCtxSetCurrent(context));
        check(driver::cuModuleLoadData(
            &raw mut module,
            image.as_ptr().cast(),
        ));
        check(driver::cuModuleGetFunction(
            &raw mut function,
            module,
            name.as_ptr(),
        ));
    }
    function
}

/// Compiles planted.cu with the model's compiler.
fn compile() -> Vec<u8> {
    let text = |path: &Path| CString::new(std::fs::read(path).unwrap()).unwrap();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let names = [c"common.cuh", c"ptx.cuh", c"wgmma.cuh"];
    let headers = names.map(|name| text(&kernels.join(name.to_str().unwrap())));
    let header_pointers = headers.each_ref().map(|header| header.as_ptr());
    let name_pointers = names.map(CStr::as_ptr);
    let options = [c"--gpu-architecture=sm_90a", c"--std=c++17"].map(CStr::as_ptr);
    let source = text(&selftest());
    let mut program = ptr::null_mut();
    let mut size = 0;
    // SAFETY: all strings are null-terminated and live through the calls; the image has the reported size.
    unsafe {
        accept(nvrtc::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            c"planted.cu".as_ptr(),
            names.len() as i32,
            header_pointers.as_ptr(),
            name_pointers.as_ptr(),
        ));
        accept(nvrtc::nvrtcCompileProgram(program, 2, options.as_ptr()));
        accept(nvrtc::nvrtcGetCUBINSize(program, &raw mut size));
        let mut image = vec![0_u8; size];
        accept(nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()));
        image
    }
}

fn selftest() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("host/selftest/planted.cu")
}

#[track_caller]
fn check(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

#[track_caller]
fn accept(result: nvrtcResult) {
    assert_eq!(result, nvrtcResult::NVRTC_SUCCESS);
}
