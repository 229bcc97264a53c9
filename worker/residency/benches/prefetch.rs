//! Share of the disk time that overlaps with computing: a token over weights that exceed memory, without advice, with
//! one request to the kernel per region of a module, and in pieces that the kernel honours.
//!
//! `sudo cargo bench -p hearth-residency`. It limits its own memory and disk by cgroup v1, which needs root;
//! without it, it says so and measures nothing. `HEARTH_BENCH_DIR` is a directory on the disk to measure (default: the
//! target directory).
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark may panic; clippy.toml's exemption does not reach its helpers"
)]

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{CpuBackend, CpuOptions};
use hearth_model::{ModuleSpec, Residency, TensorShape, modules};
use hearth_residency::{MmapPrefetch, MmapPrefetchOptions, ReadAhead};
use rustix::fs::{Advice, fadvise, major, minor};

/// Eight layers of about 20 MiB.
const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 512, "intermediate_size": 2730,
    "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 64}"#;
const MEMORY_BYTES: u64 = 64 << 20;
const DISK_BYTES_PER_SECOND: u64 = 40 << 20;
/// Simulated compute time of a layer: two thirds of the time that the disk needs for it.
const COMPUTE: Duration = Duration::from_millis(330);
/// Two layers: the running one and the next one.
const BUDGET_BYTES: u64 = 42 << 20;
const LOOKAHEAD: usize = 8;
const TOKENS: u32 = 3;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, directory, way] = arguments.as_slice()
        && flag == "--way"
    {
        let seconds = run(Path::new(directory), way);
        println!("{seconds}");
        return Ok(());
    }
    let home = std::env::var_os("HEARTH_BENCH_DIR");
    let home = home.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let directory = tempfile::tempdir_in(home)?;
    let file = write_checkpoint(directory.path())?;
    let groups = match Groups::new(&file) {
        Ok(groups) => groups,
        Err(why) => {
            println!(
                "SKIPPED: control groups of version 1 for memory and blkio, and root, are needed: {why}"
            );
            return Ok(());
        }
    };
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{} MiB of weights, {} MiB of memory, {} MiB/s, {} ms of computing a layer, {TOKENS} tokens",
        mib(fs::metadata(&file)?.len()),
        mib(MEMORY_BYTES),
        mib(DISK_BYTES_PER_SECOND),
        COMPUTE.as_millis(),
    );
    let disk_s =
        fs::metadata(&file)?.len() as f64 / DISK_BYTES_PER_SECOND as f64 * f64::from(TOKENS);
    let mut without = None;
    for way in ["none", "whole", "pieces"] {
        // Each variant starts with nothing in memory.
        fadvise(File::open(&file)?, 0, None, Advice::DontNeed)?;
        let seconds = groups.measure(directory.path(), way)?;
        let without = *without.get_or_insert(seconds);
        println!(
            "{way:7} {seconds:6.2} s   {:.2} of the time without advice   {:.2} of the disk's own",
            seconds / without,
            seconds / disk_s
        );
    }
    Ok(())
}

/// Runs tokens over the weights, and returns the time in seconds.
fn run(directory: &Path, way: &str) -> f64 {
    let config = ModelConfig::read(directory).unwrap();
    let checkpoint = Checkpoint::open(directory).unwrap();
    let specs = modules(&config).unwrap();
    let options = MmapPrefetchOptions {
        budget_bytes: BUDGET_BYTES,
        lookahead: LOOKAHEAD,
        read_ahead: ReadAhead::default(),
        is_short: true,
        advice_bytes: (way == "whole").then_some(usize::MAX),
        listener: None,
    };
    let policy = (way != "none").then(|| {
        let backend = Arc::new(CpuBackend::new(CpuOptions::default()).unwrap());
        MmapPrefetch::open(&checkpoint, specs.clone(), backend, options).unwrap()
    });
    let began = Instant::now();
    for _ in 0..TOKENS {
        for spec in &specs[1..] {
            let guard = policy
                .as_ref()
                .map(|policy| policy.acquire(spec.id).unwrap());
            let bytes = touch(spec, &checkpoint);
            let share = bytes as f64 * 8.0 / checkpoint.total_bytes() as f64;
            sleep(COMPUTE.mul_f64(share));
            drop(guard);
        }
    }
    began.elapsed().as_secs_f64()
}

/// Reads one byte of each page, as arithmetic would; returns the module's size in bytes.
fn touch(spec: &ModuleSpec, checkpoint: &Checkpoint) -> u64 {
    let tensors = spec.tensors.iter();
    let parts = tensors.filter_map(|tensor| checkpoint.parts(&tensor.name).ok());
    parts
        .flatten()
        .map(|info| {
            let (first, size) = (info.offset as usize, info.size_bytes as usize);
            let bytes = &checkpoint.files()[info.file].data[first..first + size];
            let sum = bytes.iter().step_by(4096).fold(0u8, |sum, byte| sum ^ byte);
            std::hint::black_box(sum);
            info.size_bytes
        })
        .sum()
}

/// Writes zeros in the shapes of the model to disk.
fn write_checkpoint(directory: &Path) -> io::Result<PathBuf> {
    fs::write(directory.join("config.json"), CONFIG)?;
    let specs = modules(&ModelConfig::parse(CONFIG).unwrap()).unwrap();
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for tensor in specs.iter().flat_map(|spec| &spec.tensors) {
        let shape = match tensor.shape {
            TensorShape::Matrix { rows, cols } => vec![rows, cols],
            TensorShape::Vector { len } => vec![len],
        };
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        let entry =
            serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header)?;
    let path = directory.join("model.safetensors");
    let mut file = BufWriter::new(File::create(&path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for _ in 0..end.div_ceil(1 << 20) {
        file.write_all(&vec![1; 1 << 20][..(1 << 20).min(end)])?;
    }
    let file = file.into_inner()?;
    file.set_len((8 + header.len() + end) as u64)?;
    file.sync_all()?;
    Ok(path)
}

/// Control groups that limit memory and I/O on the file's disk; removed at the end.
struct Groups {
    memory: PathBuf,
    blkio: PathBuf,
}

impl Groups {
    fn new(file: &Path) -> io::Result<Self> {
        let name = format!("hearth-prefetch-{}", std::process::id());
        let groups = Self {
            memory: Path::new("/sys/fs/cgroup/memory").join(&name),
            blkio: Path::new("/sys/fs/cgroup/blkio").join(&name),
        };
        fs::create_dir(&groups.memory)?;
        fs::create_dir(&groups.blkio)?;
        fs::write(
            groups.memory.join("memory.limit_in_bytes"),
            MEMORY_BYTES.to_string(),
        )?;
        let device = fs::metadata(file)?.dev();
        let limit = format!(
            "{}:{} {DISK_BYTES_PER_SECOND}",
            major(device),
            minor(device)
        );
        fs::write(groups.blkio.join("blkio.throttle.read_bps_device"), limit)?;
        Ok(groups)
    }

    /// Runs one variant in a process in these groups; returns the time in seconds.
    fn measure(&self, directory: &Path, way: &str) -> io::Result<f64> {
        let script =
            r#"echo $$ > "$1/cgroup.procs" && echo $$ > "$2/cgroup.procs" && shift 2 && exec "$@""#;
        let output = Command::new("/bin/sh")
            .args(["-c", script, "sh"])
            .args([&self.memory, &self.blkio])
            .arg(std::env::current_exe()?)
            .arg("--way")
            .arg(directory)
            .arg(way)
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        let seconds = text.trim().parse();
        seconds.map_err(|_| io::Error::other(format!("{way}: {}: {errors}", output.status)))
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.memory);
        let _ = fs::remove_dir(&self.blkio);
    }
}
