//! Where the programs are, and how one is run to its end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The source tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map_or_else(PathBuf::new, Path::to_path_buf)
}

/// Where cargo puts the programs: target/PROFILE.
pub(crate) fn target_directory() -> PathBuf {
    // Tests lie in deps below it.
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

/// One of the programs of the workspace.
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

/// The `hearth` program.
pub fn hearth() -> Command {
    Command::new(program("hearth"))
}

/// The `hearth-worker` program.
pub fn worker() -> Command {
    Command::new(program("hearth-worker"))
}

/// The Python interpreter with the packages that the tests use.
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

/// Says what is not tested on this machine, past the test harness, which shows only what failed tests print.
pub fn skipped(why: &str) {
    use std::io::Write;
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// Runs a command to its end: exit code, standard output, standard error.
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
