//! What a release consists of: images for two platforms, the packed chart, SBOMs, checksums, and the bundle for nodes
//! without internet, made by `hearth-release` and `scripts/release.sh` from programs of some bytes.

mod bundle;
mod images;
mod sboms;
mod script;
#[path = "../../../worker/fetch/tests/support/mod.rs"]
mod server;

use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{elf_header, release_tool, run};

/// ELF machines of the platforms, with the platforms' names.
const MACHINES: [(&str, u16); 2] = [("amd64", 62), ("arm64", 183)];
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns an ELF program for a machine, with a name by which it is known again.
fn program(machine: u16, name: &str) -> Vec<u8> {
    [elf_header(machine), name.as_bytes().to_vec()].concat()
}

/// Writes both programs for both platforms, as `scripts/release.sh --programs` finds them, and a kernel.
fn write_programs(directory: &Path) {
    for (platform, machine) in MACHINES {
        let below = directory.join(platform);
        std::fs::create_dir_all(&below).expect("a directory");
        for name in ["hearth", "hearth-worker"] {
            let bytes = program(machine, &format!("{name} for {platform}"));
            std::fs::write(below.join(name), bytes).expect("a program");
        }
    }
    let kernels = directory.join("kernels");
    std::fs::create_dir_all(&kernels).expect("a directory");
    std::fs::write(kernels.join("k.cubin"), "a kernel").expect("a kernel");
}

/// Runs `hearth-release`, which must succeed; returns what it prints.
fn release(arguments: &[&str]) -> String {
    let (code, stdout, stderr) = run(Command::new(release_tool())
        .args(arguments)
        .env_remove("SOURCE_DATE_EPOCH"));
    assert_eq!(code, 0, "{arguments:?}\n{stdout}\n{stderr}");
    stdout
}

/// The same for a call that must fail; returns the message.
fn refused(arguments: &[&str]) -> String {
    let (code, stdout, stderr) = run(Command::new(release_tool()).args(arguments));
    assert_eq!(code, 1, "{arguments:?}\n{stdout}\n{stderr}");
    stderr
}

/// All files below a directory with their contents, by path.
fn contents(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    let mut left = vec![directory.to_path_buf()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(&next).expect("a directory").flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => left.push(path),
                false => {
                    let bytes = std::fs::read(&path).expect("a file");
                    let inside = path.strip_prefix(directory).expect("below").to_path_buf();
                    files.push((inside, bytes));
                }
            }
        }
    }
    files.sort();
    files
}

/// The files of a tar archive with their contents, in order.
fn unpacked(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let entries = archive.entries().expect("a tar");
    entries
        .map(|entry| {
            let mut entry = entry.expect("an entry");
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).expect("its bytes");
            let path = entry.path().expect("a path").display().to_string();
            (path, bytes)
        })
        .collect()
}

/// What gzip has compressed.
fn inflated(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut decoder = flate2::read::GzDecoder::new(bytes);
    std::io::Read::read_to_end(&mut decoder, &mut plain).expect("gzip");
    plain
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}
