//! Locations of the programs, and running one to completion.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the root of the source tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map_or_else(PathBuf::new, Path::to_path_buf)
}

/// Returns cargo's output directory of the programs: target/PROFILE.
pub(crate) fn target_directory() -> PathBuf {
    // Test binaries are in its `deps` subdirectory.
    let exe = std::env::current_exe().unwrap_or_default();
    let directory = exe.parent().unwrap_or(&exe);
    let above = directory.parent().unwrap_or(directory);
    if directory.ends_with("deps") {
        above
    } else {
        directory
    }
    .to_path_buf()
}

/// Returns the path of one of the workspace's programs.
///
/// # Panics
/// When it is not built.
pub(crate) fn program(name: &str) -> PathBuf {
    let path = target_directory().join(name);
    assert!(
        path.is_file(),
        "{} is not built: run `cargo build --workspace --bins` first, as `make test` does",
        path.display()
    );
    path
}

/// Creates a command for the `hearth` program.
pub fn hearth() -> Command {
    Command::new(program("hearth"))
}

/// Creates a command for the `hearth-worker` program.
pub fn worker() -> Command {
    Command::new(program("hearth-worker"))
}

/// Returns the path of the `hearth-release` program.
pub fn release_tool() -> PathBuf {
    program("hearth-release")
}

/// Returns a program that consists of the header of an ELF file alone, for one of ELF's machines: 62 for x86-64, 183 for 64-bit
/// ARM. It loads nothing and runs nowhere.
pub fn elf_header(machine: u16) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    for half in [2, machine] {
        bytes.extend(half.to_le_bytes());
    }
    bytes.extend(1_u32.to_le_bytes());
    // No entry point, no program headers, no section headers.
    bytes.extend([0; 28]);
    for half in [64_u16, 56, 0, 64, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes
}

/// Returns the Python interpreter with the packages that the tests use.
///
/// # Panics
/// When `scripts/bootstrap.sh test` has not prepared it.
pub fn python() -> PathBuf {
    let cache = std::env::var_os("HEARTH_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/hearth"),
        PathBuf::from,
    );
    let python = cache.join("py/bin/python");
    assert!(
        python.is_file(),
        "{} is missing: run `scripts/bootstrap.sh test` first, as `make test` does",
        python.display()
    );
    python
}

/// Reports a skipped test directly on stderr: the test harness shows only what failed tests print.
pub fn skipped(why: &str) {
    use std::io::Write;
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    // A closed stderr is not a reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// Runs a command to completion; returns its exit code, standard output and standard error.
///
/// # Panics
/// When it cannot be run or is killed by a signal.
pub fn run(command: &mut Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (stdout, stderr) = (text(stdout), text(stderr));
    let code = status
        .code()
        .unwrap_or_else(|| panic!("{command:?} was killed: {status}\n{stderr}"));
    (code, stdout, stderr)
}

/// Gives a virtual device the fault that a file tells of: it is read at any moment, so it is there with all its text or not at all.
///
/// # Panics
/// When the file cannot be written.
pub fn write_fault(file: &Path, text: &str) {
    let written = file.with_extension("new");
    std::fs::write(&written, text)
        .and_then(|()| std::fs::rename(&written, file))
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}
