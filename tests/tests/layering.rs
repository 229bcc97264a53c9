//! The architecture's dependency arrows, from `layers.txt`, the limit on file size, and access to the environment
//! (house rules 1, 2 and 4).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum lines of a source file, including its tests (house rule 2).
const MAX_FILE_LINES: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("workspace root")
}

struct Layer {
    allowed: BTreeSet<String>,
    forbidden: BTreeSet<String>,
}

fn read_layers() -> BTreeMap<String, Layer> {
    let text = std::fs::read_to_string(root().join("layers.txt")).expect("layers.txt");
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, rest) = line
                .split_once(':')
                .unwrap_or_else(|| panic!("layers.txt: `{line}` has no colon"));
            let (forbidden, allowed): (Vec<_>, Vec<_>) = rest
                .split_whitespace()
                .partition(|word| word.starts_with('!'));
            let layer = Layer {
                allowed: allowed.into_iter().map(str::to_owned).collect(),
                forbidden: forbidden
                    .into_iter()
                    .map(|word| word[1..].to_owned())
                    .collect(),
            };
            (name.to_owned(), layer)
        })
        .collect()
}

/// Reads the normal and build dependencies of every workspace crate.
fn read_dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo metadata");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("metadata JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    packages
        .iter()
        .map(|package| {
            let name = package["name"].as_str().expect("name").to_owned();
            let dependencies = package["dependencies"].as_array().expect("dependencies");
            let names = dependencies
                .iter()
                .filter(|dependency| dependency["kind"].as_str() != Some("dev"))
                .map(|dependency| dependency["name"].as_str().expect("name").to_owned())
                .collect();
            (name, names)
        })
        .collect()
}

#[test]
fn crates_depend_only_along_the_arrows() {
    let layers = read_layers();
    let dependencies = read_dependencies();
    let mut faults = Vec::new();
    for (name, actual) in &dependencies {
        let Some(layer) = layers.get(name) else {
            faults.push(format!("{name} has no line in layers.txt"));
            continue;
        };
        let ours: BTreeSet<_> = actual
            .iter()
            .filter(|dependency| dependency.starts_with("hearth-"))
            .cloned()
            .collect();
        for extra in ours.difference(&layer.allowed) {
            faults.push(format!("{name} → {extra} is no arrow of layers.txt"));
        }
        for unused in layer.allowed.difference(&ours) {
            faults.push(format!(
                "layers.txt allows {name} → {unused}, which nothing uses"
            ));
        }
        for forbidden in actual.intersection(&layer.forbidden) {
            faults.push(format!("{name} must never see {forbidden}"));
        }
    }
    for name in layers
        .keys()
        .filter(|name| !name.contains('/') && !dependencies.contains_key(*name))
    {
        faults.push(format!("layers.txt names {name}, which is no crate"));
    }
    assert!(faults.is_empty(), "layering:\n  {}", faults.join("\n  "));
}

/// Returns the modules of its own crate that a text names by `crate::`.
fn named_modules(text: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    let named = text.split("crate::").skip(1).map(|rest| {
        let end = rest.find(|letter| !is_name(letter));
        rest[..end.unwrap_or(rest.len())].to_owned()
    });
    named.filter(|name| !name.is_empty()).collect()
}

/// Returns the modules that `path`, a folder of modules or one file, imports from its crate.
fn module_imports(path: &Path) -> BTreeSet<String> {
    let mut files = Vec::new();
    if path.is_dir() {
        source_files(path, &mut files);
    } else {
        files.push(path.with_extension("rs"));
    }
    let texts = files.iter().map(|file| {
        std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    });
    texts.flat_map(|text| named_modules(&text)).collect()
}

#[test]
fn folders_import_only_along_the_arrows() {
    let layers = read_layers();
    let folders = layers.iter().filter(|(name, _)| name.contains('/'));
    let mut crates = BTreeMap::<PathBuf, BTreeSet<String>>::new();
    let mut faults = Vec::new();
    for (name, layer) in folders {
        let path = root().join(name);
        let own = path.file_name().and_then(|own| own.to_str()).expect("name");
        let sources = path.parent().expect("a folder of sources").to_owned();
        crates.entry(sources).or_default().insert(own.to_owned());
        let imports = module_imports(&path);
        let others: BTreeSet<_> = imports.into_iter().filter(|it| it != own).collect();
        for extra in others.difference(&layer.allowed) {
            faults.push(format!("{name} → {extra} is no arrow of layers.txt"));
        }
        for unused in layer.allowed.difference(&others) {
            faults.push(format!(
                "layers.txt allows {name} → {unused}, which nothing uses"
            ));
        }
    }
    assert!(!crates.is_empty(), "layers.txt names no folders");
    for (sources, known) in crates {
        for entry in std::fs::read_dir(&sources).expect("read_dir").flatten() {
            let path = entry.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("name").to_owned();
            if name != "main" && !known.contains(&name) {
                faults.push(format!("{} has no line in layers.txt", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "layering:\n  {}", faults.join("\n  "));
}

/// File extensions that the rule applies to: Rust, CUDA and C++.
const SOURCES: [&str; 6] = ["rs", "cu", "cuh", "cpp", "h", "c"];

fn source_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("read_dir").flatten() {
        let path = entry.path();
        if path.is_dir() {
            let name = entry.file_name();
            if !matches!(name.to_str(), Some("target" | ".git")) {
                source_files(&path, found);
            }
        } else {
            let extension = path.extension().and_then(|extension| extension.to_str());
            if extension.is_some_and(|extension| SOURCES.contains(&extension)) {
                found.push(path);
            }
        }
    }
}

#[test]
fn files_stay_short() {
    let mut files = Vec::new();
    source_files(&root(), &mut files);
    for kind in SOURCES {
        let is_found = files
            .iter()
            .any(|path| path.extension().is_some_and(|e| e == kind));
        assert!(is_found, "the walk found no .{kind} file");
    }
    let long: Vec<_> = files
        .iter()
        .filter_map(|path| {
            let text = std::fs::read_to_string(path).expect("source file");
            let lines = text.lines().count();
            let shown = path.strip_prefix(root()).unwrap_or(path).display();
            (lines > MAX_FILE_LINES).then(|| format!("{shown}: {lines} lines"))
        })
        .collect();
    assert!(
        long.is_empty(),
        "over {MAX_FILE_LINES} lines, split by what changes together:\n  {}",
        long.join("\n  ")
    );
}

/// Whether a source file may read the environment: programs, tests, benchmarks, and the host model, which simulates a
/// driver.
fn may_read_environment(path: &Path) -> bool {
    let shown = path.to_str().unwrap_or_default();
    let allowed = [
        "operator/src/main.rs",
        "worker/src/main.rs",
        "worker/cuda/host/",
        "tests/",
        "fuzz/",
    ];
    allowed.iter().any(|start| shown.starts_with(start))
        || path
            .components()
            .any(|part| matches!(part.as_os_str().to_str(), Some("tests" | "benches")))
}

#[test]
fn libraries_read_no_environment() {
    let root = root();
    let mut files = Vec::new();
    source_files(&root, &mut files);
    let mut allowed = 0;
    let mut faults = Vec::new();
    for path in files
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
    {
        let shown = path.strip_prefix(&root).unwrap_or(path);
        let text = std::fs::read_to_string(path).expect("source file");
        let before_tests = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(&text);
        let reads = before_tests.lines().filter(|line| {
            let is_comment = line.trim_start().starts_with("//");
            !is_comment && line.contains("env::var")
        });
        match (reads.count(), may_read_environment(shown)) {
            (0, _) => {}
            (reads, true) => allowed += reads,
            (_, false) => faults.push(shown.display().to_string()),
        }
    }
    assert!(
        allowed > 0,
        "the search finds no program that reads the environment"
    );
    assert!(
        faults.is_empty(),
        "the environment is read by programs and passed on (house rule 4):\n  {}",
        faults.join("\n  ")
    );
}
