//! NVIDIA's compiler accepts every kernel for every supported GPU generation, no kernel spills registers except attention
//! of the largest heads, and each can be launched: its registers and shared memory are there for a whole block. What the
//! compiler said is kept under `$HEARTH_CACHE/nvrtc-logs`, so that only kernels that changed since are compiled again.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use hearth_cuda::{Variant, all_variants, compile_one};
use sha2::{Digest, Sha256};

const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90a", "sm_120a"];
/// Maximum registers per thread.
const MOST_REGISTERS: u32 = 255;
/// Registers of a multiprocessor; each thread takes a multiple of eight.
const BLOCK_REGISTERS: u32 = 65_536;
/// Shared memory that every kernel leaves unused, for tools and drivers that take some.
const SLACK_BYTES: u32 = 1 << 10;

/// The assembler's report on one kernel file.
struct Compiled {
    architecture: &'static str,
    registers: u32,
    seconds: f64,
    faults: Vec<String>,
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let library = nvrtc();
    let logs = Logs::of(&library);
    hearth_cuda_host::load(&library);
    let variants = all_variants();
    let jobs: Vec<(&Variant, &'static str)> = variants
        .iter()
        .flat_map(|variant| ARCHITECTURES.map(|architecture| (variant, architecture)))
        .filter(|(variant, architecture)| variant.runs_on(architecture))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((variant, architecture)) =
                    jobs.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let compiled = compile(variant, architecture, &logs);
                    done.lock().unwrap().push(compiled);
                }
            });
        }
    });
    let done = done.into_inner().unwrap();
    assert_eq!(done.len(), jobs.len(), "a compilation panicked");
    for architecture in ARCHITECTURES {
        report(&done, architecture);
    }
    say(
        "SKIPPED: what gemm_fp8_sm90 and attention_sm90 give on hardware waits for a GPU of compute capability 9.0; the host model ran them",
    );
    let faults: Vec<&str> = done
        .iter()
        .flat_map(|compiled| &compiled.faults)
        .map(String::as_str)
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The compiler's logs by everything that they depend on.
struct Logs(PathBuf);

impl Logs {
    fn of(library: &Path) -> Self {
        let hash = Sha256::digest(std::fs::read(library).unwrap());
        let compiler: String = hash[..8].iter().map(|b| format!("{b:02x}")).collect();
        let directory = cache().join("nvrtc-logs").join(compiler);
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    /// Compiles what this compiler has not compiled before.
    fn read(&self, variant: &Variant, architecture: &str) -> Result<String, String> {
        let file = self.0.join(variant.cache_key(architecture));
        if let Ok(log) = std::fs::read_to_string(&file) {
            return Ok(log);
        }
        let compiled = compile_one(variant, architecture).map_err(|error| error.to_string());
        let (cubin, log) = compiled?;
        if cubin.is_empty() {
            return Err(format!("an empty cubin\n{log}"));
        }
        let mut written = tempfile::NamedTempFile::new_in(&self.0).unwrap();
        written.write_all(log.as_bytes()).unwrap();
        written.persist(&file).unwrap();
        Ok(log)
    }
}

fn compile(variant: &Variant, architecture: &'static str, logs: &Logs) -> Compiled {
    let began = Instant::now();
    let name = format!("{} {:?} for {architecture}", variant.file, variant.defines);
    let mut compiled = Compiled {
        architecture,
        registers: 0,
        seconds: 0.0,
        faults: Vec::new(),
    };
    match logs.read(variant, architecture) {
        Ok(log) => {
            let (registers, spilled) = (registers(&log), spilled_bytes(&log));
            compiled.registers = registers;
            // Registers are reported once per entry point: a log without them is
            // one that this test does not understand.
            if registers == 0 || registers > MOST_REGISTERS {
                compiled
                    .faults
                    .push(format!("{name}: {registers} registers\n{log}"));
            }
            // Reported, for example, for wgmma that the assembler serialises.
            if log.contains("Performance Loss") {
                compiled.faults.push(format!("{name} is held up\n{log}"));
            }
            compiled.faults.extend(
                unlaunchable(variant, architecture, &log)
                    .into_iter()
                    .map(|why| format!("{name}: {why}\n{log}")),
            );
            if spilled > allowed_spills(variant) {
                compiled
                    .faults
                    .push(format!("{name} spills {spilled} bytes\n{log}"));
            }
        }
        Err(error) => compiled.faults.push(format!("{name}: {error}")),
    }
    compiled.seconds = began.elapsed().as_secs_f64();
    compiled
}

/// Bytes of registers that may be spilled to memory, stores and loads together. Attention has, in each thread, 48
/// fragments of probabilities besides the sums of its values: with 64 rows per block, 64 for values of 256 and 128 for
/// latents of 512, of which a few words no longer fit. Half the rows would avoid this but read the cache twice. With
/// 16 rows and latents it is one word on some architectures, and with queries and scores in registers (128 rows) two, as in
/// kernels that read FP8 weights with three blocks on a multiprocessor, or BF16 in three terms with two; all are faster for it.
/// With keys of 192 it is up to five since their exponential is one instruction: faster on an H100, where it is three.
fn allowed_spills(variant: &Variant) -> u64 {
    let has = |define| variant.defines.contains(&define);
    match variant.file {
        "attention" if has(("V_DIM", 512)) && has(("ROWS", 64)) => 384,
        "attention" if has(("V_DIM", 512)) => 16,
        "attention" if has(("V_DIM", 256)) && has(("ROWS", 64)) => 32,
        "attention" if has(("ROWS", 128)) && has(("K_DIM", 192)) => 40,
        "attention" if has(("ROWS", 128)) => 16,
        "linear" | "experts" if has(("WEIGHT_TYPE", 3)) && has(("ACTIVATIONS", 1)) => 24,
        "linear" | "experts" if has(("WEIGHT_TYPE", 2)) && has(("ACTIVATIONS", 0)) => 16,
        _ => 0,
    }
}

/// Why a block of one of the entry points in this log may be refused at its launch; empty if none is.
fn unlaunchable(variant: &Variant, architecture: &str, log: &str) -> Vec<String> {
    let mut reasons = Vec::new();
    let mut entry_points = 0;
    for section in log.split("Compiling entry function '").skip(1) {
        let name = section.split('\'').next().unwrap();
        entry_points += 1;
        let needed = registers(section).next_multiple_of(8) * variant.threads();
        if needed > BLOCK_REGISTERS {
            reasons.push(format!("{name} needs {needed} registers for a block"));
        }
        let (fixed, dynamic) = (static_bytes(section), variant.shared_bytes(name));
        let room = opt_in_bytes(architecture) - SLACK_BYTES;
        if fixed + dynamic > room || dynamic == 0 && fixed > 48 << 10 {
            reasons.push(format!(
                "{name} needs {fixed} and {dynamic} bytes of shared memory, and {room} may be used"
            ));
        }
    }
    if entry_points == 0 {
        reasons.push("the log names no entry point".to_owned());
    }
    reasons
}

/// Shared memory that a block may ask for (CUDA C++ programming guide, table of technical specifications): all that a
/// multiprocessor has, less the 1 KiB that the driver keeps for each block.
fn opt_in_bytes(architecture: &str) -> u32 {
    let kib = match architecture {
        "sm_80" => 163,
        "sm_90a" => 227,
        _ => 99,
    };
    kib << 10
}

/// `, 8320 bytes smem,`: what the source declares with a size.
fn static_bytes(section: &str) -> u32 {
    let Some((before, _)) = section.split_once(" bytes smem") else {
        return 0;
    };
    before.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Maximum over the entry points in this log: `Used 170 registers`.
fn registers(log: &str) -> u32 {
    let uses = log.split("Used ").skip(1);
    uses.filter_map(|rest| rest.split_once(" registers")?.0.parse().ok())
        .max()
        .unwrap_or(0)
}

/// Sum over the entry points: `0 bytes spill stores, 0 bytes spill loads`.
fn spilled_bytes(log: &str) -> u64 {
    log.match_indices(" bytes spill")
        .filter_map(|(at, _)| {
            log[..at]
                .rsplit([' ', '\n', ','])
                .next()?
                .parse::<u64>()
                .ok()
        })
        .sum()
}

#[test]
fn the_assembler_s_log_is_understood() {
    let log = "ptxas         .     0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 170 registers, used 1 barriers\n\
        ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 38 registers";
    assert_eq!((registers(log), spilled_bytes(log)), (170, 20));
    assert_eq!((registers(""), spilled_bytes("")), (0, 0));
    let entry = |name: &str, registers: u32, smem: u32| {
        format!(
            "ptxas info    : Compiling entry function '{name}' for 'sm_89'\n\
            ptxas info    : Used {registers} registers, used 1 barriers, {smem} bytes smem, 400 bytes cmem[0]\n"
        )
    };
    let plain = all_variants().into_iter().find(|v| v.file == "moe_sort");
    let why = |log: &str| unlaunchable(plain.as_ref().unwrap(), "sm_89", log);
    assert!(why(&entry("moe_sort", 64, 48 << 10)).is_empty());
    assert!(why(&entry("moe_sort", 65, 1))[0].contains("registers for a block"));
    assert!(why(&entry("moe_sort", 64, (48 << 10) + 4))[0].contains("shared memory"));
    assert!(why("")[0].contains("no entry point"));
}

/// Prints one line per architecture.
fn report(done: &[Compiled], architecture: &str) {
    let of_it: Vec<&Compiled> = done
        .iter()
        .filter(|compiled| compiled.architecture == architecture)
        .collect();
    let seconds: f64 = of_it.iter().map(|compiled| compiled.seconds).sum();
    let registers = of_it.iter().map(|compiled| compiled.registers).max();
    say(&format!(
        "{architecture}: {} kernel files, compiled or read in {seconds:.0} s of CPU time, {} registers at most",
        of_it.len(),
        registers.unwrap_or(0)
    ));
}

/// Prints even where the test's own output is not shown.
fn say(line: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// NVRTC from the PyPI wheel that `make test` installs.
fn nvrtc() -> PathBuf {
    let cache = cache();
    let wheel = Path::new("site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    let python = std::fs::read_dir(cache.join("py/lib"))
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join(wheel)))
        .find(|library| library.exists());
    python.unwrap_or_else(|| {
        panic!(
            "NVRTC is not under {}: run `make test`, whose bootstrap installs it",
            cache.join("py").display()
        )
    })
}

fn cache() -> PathBuf {
    let home = std::env::var_os("HOME").map_or_else(|| "/tmp".into(), PathBuf::from);
    std::env::var_os("HEARTH_CACHE").map_or_else(|| home.join(".cache/hearth"), PathBuf::from)
}
