//! Builds the host model of CUDA and installs it where the CUDA backend looks for the driver.
//!
//! The model itself is C++ (`../src`): a `libcuda.so.1` and a `libnvrtc.so.12` that replace NVIDIA's. The engine does
//! not know about it: a process either loads these libraries before its first driver call ([`install`]), or is started
//! with their directory in `LD_LIBRARY_PATH` ([`libraries`]).

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, io};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

/// Libraries that replace the driver, the compiler and the management library.
const LIBRARIES: [&str; 3] = ["libcuda.so.1", "libnvrtc.so.12", "libnvidia-ml.so.1"];

/// Returns the directory with the libraries, building them if that has not been done for these sources.
///
/// # Panics
/// If they cannot be built, with the compiler's message.
pub fn libraries() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).clone()
}

/// Directory of kernels compiled by the model: never among those of a real GPU,
/// and separate for kernels with and without checks.
pub fn kernel_cache() -> PathBuf {
    let checked = env::var_os("HEARTH_HOST_MODEL_CHECKS").is_none_or(|value| value != "0");
    libraries().join(if checked { "checked" } else { "unchecked" })
}

/// Loads the libraries into this process, before its first driver call.
///
/// # Panics
/// If they cannot be built or loaded.
pub fn install() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        let directory = libraries();
        LIBRARIES
            .iter()
            .for_each(|name| load(&directory.join(name)));
    });
}

/// Loads one library permanently: later requests for its name get it.
///
/// # Panics
/// If it cannot be loaded.
pub fn load(library: &Path) {
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path without zero bytes");
    // SAFETY: the initialisers are the library's own; the handle is never closed.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "{} cannot be loaded", library.display());
}

fn build() -> PathBuf {
    let home = PathBuf::from(env::var_os("HOME").unwrap_or_else(|| "/tmp".into()));
    let cache =
        env::var_os("HEARTH_CACHE").map_or_else(|| home.join(".cache/hearth"), PathBuf::from);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let parent = cache.join("host-model");
    let directory = parent.join(format!("lib-{}", fingerprint(sources)));
    fs::create_dir_all(&parent).expect("the cache directory can be written");
    let lock = fs::File::create(parent.join(".lock")).expect("the cache directory can be written");
    flock(&lock, FlockOperation::LockExclusive).expect("the cache can be locked");
    if LIBRARIES.iter().all(|name| directory.join(name).exists()) {
        return directory;
    }
    let output = Command::new(sources.join("build.sh"))
        .arg(&directory)
        .output()
        .expect("build.sh runs");
    assert!(
        output.status.success(),
        "the host model does not build (it needs g++):\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    directory
}

/// Fingerprint of all sources of the libraries.
fn fingerprint(sources: &Path) -> String {
    let mut files = Vec::new();
    for part in ["src", "include"] {
        collect(&sources.join(part), &mut files).expect("the sources can be read");
    }
    files.push(sources.join("build.sh"));
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        hash.update(
            file.strip_prefix(sources)
                .expect("inside")
                .as_os_str()
                .as_bytes(),
        );
        hash.update(fs::read(&file).expect("the sources can be read"));
    }
    hash.finalize()[..8]
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
