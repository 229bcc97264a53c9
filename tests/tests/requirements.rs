//! Imports of Python scripts are in a list of requirements: a package that happens to be installed must not hide that
//! no list names it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{python, root, run};

const LIST: &str = "requirements.txt";
/// Scripts that run with the packages of a list that is not next to or above them.
const ELSEWHERE: [(&str, &str); 1] = [("worker/cuda/host/selftest", "tests/python")];
/// Modules whose names differ from their packages'.
const MODULES: [(&str, &str); 1] = [("yaml", "pyyaml")];
/// Packages that no script imports: libraries for programs that are not Python.
const LIBRARIES: [&str; 1] = ["nvidia-cuda-nvrtc-cu12"];

#[test]
fn every_import_of_a_script_is_in_its_requirements() {
    let root = root();
    let scripts = scripts(&root);
    assert!(scripts.len() > 10, "found only {scripts:?}");
    let (code, stdout, stderr) = run(Command::new(python())
        .arg("tests/python/imports.py")
        .args(&scripts)
        .current_dir(&root));
    assert_eq!(code, 0, "{stderr}");

    let mut faults = Vec::new();
    let mut imported: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    for line in stdout.lines() {
        let (script, module) = line.split_once(' ').unwrap();
        let package = package(module);
        match list_of(&root, script) {
            None => faults.push(format!(
                "{script} imports {module}, and no {LIST} lies beside or above it: write one that names {package}"
            )),
            Some(list) if !packages(&root.join(&list)).contains(&package) => faults.push(format!(
                "{script} imports {module}, which {} does not name: add {package}",
                list.display()
            )),
            Some(list) => {
                imported.entry(list).or_default().insert(package);
            }
        }
    }
    for (list, imported) in &imported {
        let unused = packages(&root.join(list))
            .into_iter()
            .filter(|package| !imported.contains(package))
            .filter(|package| !LIBRARIES.contains(&package.as_str()));
        for package in unused {
            faults.push(format!(
                "{} names {package}, which none of its scripts imports",
                list.display()
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the Python files of the source tree, as paths relative to its root.
fn scripts(root: &Path) -> Vec<String> {
    let mut scripts = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory)
            .expect("a directory")
            .flatten()
        {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if path.is_dir() {
                // Neither build output nor a user's own environment.
                let is_ours =
                    !name.starts_with('.') && name != "target" && !path.join("pyvenv.cfg").exists();
                directories.extend(is_ours.then_some(path));
            } else if name.ends_with(".py") {
                let below = path.strip_prefix(root).expect("a path below the root");
                scripts.push(below.to_str().expect("a name in UTF-8").to_owned());
            }
        }
    }
    scripts.sort_unstable();
    scripts
}

/// Returns the list of requirements nearest above a script, as a path relative to the root.
fn list_of(root: &Path, script: &str) -> Option<PathBuf> {
    let elsewhere = ELSEWHERE
        .iter()
        .find(|(directory, _)| Path::new(script).parent() == Some(Path::new(directory)))
        .map(|(_, directory)| Path::new(directory));
    elsewhere
        .into_iter()
        .chain(Path::new(script).ancestors().skip(1))
        .map(|directory| directory.join(LIST))
        .find(|list| root.join(list).is_file())
}

/// Returns the packages that a list names, in the index's spelling: lower case, with hyphens.
fn packages(list: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(list).expect("a list");
    text.lines()
        .map(|line| line.split_once('#').map_or(line, |(code, _)| code).trim())
        .filter(|line| !line.is_empty())
        .map(|line| {
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let end = line.find(|c| !is_of_name(c)).unwrap_or(line.len());
            normal(&line[..end])
        })
        .collect()
}

/// Returns the package that a module comes from.
fn package(module: &str) -> String {
    let named = MODULES.iter().find(|(known, _)| *known == module);
    named.map_or_else(|| normal(module), |(_, package)| (*package).to_owned())
}

fn normal(name: &str) -> String {
    name.to_lowercase().replace(['_', '.'], "-")
}
