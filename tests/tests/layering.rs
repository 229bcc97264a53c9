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

/// Roots of programs and libraries, and the crate's modules for tests, which may import all of it.
const NO_FOLDERS: [&str; 4] = ["main", "lib", "tests", "testing"];

/// Maximum number of floors of a crate's folders, each importing only from lower ones. A number may only fall.
const MAX_FLOORS: [(&str, usize); 3] = [
    ("operator/src", 6),
    ("operator/core/src", 8),
    ("operator/planner/src", 8),
];

/// Returns the modules of its own crate that a source file names, by `crate::` or by as many `super::` as lead to the crate.
/// `depth`: levels of its own module below the crate.
fn named_modules(text: &str, depth: usize) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (level, part) in by_level(text, depth) {
        let to_crate = "super::".repeat(level);
        named.extend(names_after(&part, "crate::"));
        if level > 0 {
            named.extend(names_after(&part, &to_crate));
        }
    }
    named
}

/// Returns the code of a file, and of each module in it, with its level below the crate; without comments.
fn by_level(text: &str, depth: usize) -> Vec<(usize, String)> {
    let mut parts = vec![(depth, String::new())];
    // Indentation of the modules that are open.
    let mut open: Vec<&str> = Vec::new();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    for line in text.lines().filter(is_code) {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let is_module = code.ends_with('{') && code.split(' ').any(|word| word == "mod");
        let before = open.len();
        if is_module {
            open.push(indent);
        } else if code == "}" && open.last() == Some(&indent) {
            open.pop();
        }
        if open.len() != before {
            parts.push((depth + open.len(), String::new()));
        } else if let Some((_, part)) = parts.last_mut() {
            part.push_str(line);
            part.push('\n');
        }
    }
    parts
}

/// Returns the names that follow a prefix of paths: one, or each of a group.
fn names_after(text: &str, prefix: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | ':');
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut named = BTreeSet::new();
    for (at, _) in text.match_indices(prefix) {
        // `super::super::x` is no `super::x`.
        if text[..at].ends_with(is_part) {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        let mut words = vec![rest];
        if let Some(group) = rest.strip_prefix('{') {
            words.clear();
            let mut level = 0;
            let mut start = 0;
            for (end, letter) in group.char_indices() {
                match letter {
                    '{' => level += 1,
                    '}' if level > 0 => level -= 1,
                    ',' | '}' if level == 0 => {
                        words.push(group[start..end].trim_start());
                        start = end + 1;
                        if letter == '}' {
                            break;
                        }
                    }
                    _ => {}
                }
            }
        }
        for word in words {
            let end = word.find(|letter| !is_name(letter)).unwrap_or(word.len());
            named.insert(word[..end].to_owned());
        }
    }
    // Only modules: items of the crate itself are not another folder's.
    named.retain(|name| name.starts_with(|letter: char| letter.is_lowercase()));
    named.retain(|name| name != "super" && name != "self");
    named
}

/// Returns the modules that `path`, a folder of modules or one file, imports from its crate.
fn module_imports(path: &Path) -> BTreeSet<String> {
    let sources = path.parent().expect("a folder of sources");
    let mut files = Vec::new();
    if path.is_dir() {
        source_files(path, &mut files);
    }
    let file = path.with_extension("rs");
    files.extend(file.exists().then_some(file));
    let mut named = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(&file);
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let inside = file.strip_prefix(sources).expect("a file of the crate");
        let is_folders = file.file_stem().is_some_and(|stem| stem == "mod");
        let depth = inside.components().count() - usize::from(is_folders);
        named.extend(named_modules(&text, depth));
    }
    named.retain(|name| !NO_FOLDERS.contains(&name.as_str()));
    named
}

#[test]
fn imports_of_every_form_are_seen() {
    let names = |text: &str, depth: usize| -> Vec<String> {
        named_modules(text, depth).into_iter().collect()
    };
    assert_eq!(
        names("use crate::a::B;\nfn f() { crate::b::c() }", 1),
        ["a", "b"]
    );
    let group = "use crate::{\n    a, b::{C, d},\n    e::F,\n};";
    assert_eq!(names(group, 1), ["a", "b", "e"]);
    assert_eq!(names("use super::{a::B, c};", 1), ["a", "c"]);
    assert_eq!(
        names("use super::a;", 2),
        [""; 0],
        "a sibling in its folder"
    );
    assert_eq!(names("use super::super::a;", 2), ["a"]);
    assert_eq!(
        names("// crate::a\n/// [`crate::b`]\nuse other::crate_a;", 1),
        [""; 0]
    );
    let inline = "mod tests {\n    use super::a;\n    use super::super::b;\n}\nuse super::c;";
    assert_eq!(names(inline, 1), ["b", "c"]);
}

/// The lines of layers.txt with a slash, by the folder of sources and the name in it.
fn folders(layers: &BTreeMap<String, Layer>) -> BTreeMap<&str, BTreeMap<&str, &Layer>> {
    let mut crates = BTreeMap::<&str, BTreeMap<&str, &Layer>>::new();
    for (name, layer) in layers {
        if let Some((sources, own)) = name.rsplit_once('/') {
            crates.entry(sources).or_default().insert(own, layer);
        }
    }
    crates
}

#[test]
fn folders_import_only_along_the_arrows() {
    let layers = read_layers();
    let crates = folders(&layers);
    let mut faults = Vec::new();
    for (sources, known) in crates {
        for (own, layer) in &known {
            let name = format!("{sources}/{own}");
            let imports = module_imports(&root().join(&name));
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
        for entry in std::fs::read_dir(root().join(sources)).expect("read_dir") {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("name");
            if !NO_FOLDERS.contains(&name) && !known.contains_key(name) {
                faults.push(format!("{} has no line in layers.txt", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "layering:\n  {}", faults.join("\n  "));
}

/// Returns the names by floor: each imports only from floors below its own. The error lists those that import from each
/// other.
fn floors<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&str>>) -> Result<Vec<Vec<&'a str>>, String> {
    let mut floors = Vec::new();
    let mut left = arrows.clone();
    while !left.is_empty() {
        let is_above = |to: &BTreeSet<&str>| to.iter().any(|to| left.contains_key(to));
        let floor: Vec<_> = left
            .iter()
            .filter(|(_, to)| !is_above(to))
            .map(|(name, _)| *name)
            .collect();
        if floor.is_empty() {
            let names: Vec<_> = left.into_keys().collect();
            return Err(names.join(", "));
        }
        left.retain(|name, _| !floor.contains(name));
        floors.push(floor);
    }
    Ok(floors)
}

#[test]
fn folders_stand_on_floors() {
    let layers = read_layers();
    let crates = folders(&layers);
    let held: Vec<&str> = MAX_FLOORS.iter().map(|(sources, _)| *sources).collect();
    let found: BTreeSet<&str> = crates.keys().copied().collect();
    assert_eq!(
        found,
        held.into_iter().collect(),
        "crates with folders in layers.txt"
    );
    for (sources, most) in MAX_FLOORS {
        let arrows = crates[sources].iter();
        let arrows = arrows.map(|(name, layer)| {
            let to = layer.allowed.iter().map(String::as_str).collect();
            (*name, to)
        });
        let floors = floors(&arrows.collect())
            .unwrap_or_else(|names| panic!("{sources}: a cycle in or below {names}"));
        println!("{sources}, {} floors:", floors.len());
        for (index, floor) in floors.iter().enumerate() {
            println!("  {} {}", index + 1, floor.join(" "));
        }
        assert!(
            floors.len() <= most,
            "{sources}: {} floors, at most {most}",
            floors.len()
        );
    }
    let cycle = BTreeMap::from([("a", BTreeSet::from(["b"])), ("b", BTreeSet::from(["a"]))]);
    assert_eq!(floors(&cycle), Err("a, b".to_owned()));
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
