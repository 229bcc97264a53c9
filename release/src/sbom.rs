//! Software bills of materials: the packages that are part of a program, with the checksums of `Cargo.lock`, in the form
//! of CycloneDX 1.5.
//!
//! Which packages these are is cargo's own answer, for the platforms of the images and with the features that a build of the
//! workspace turns on. Packages that only build others are left out; procedural macros, whose output is compiled in, are not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use toml_edit::Document;

use crate::layout::created;

/// Target triples of the platforms.
const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
/// Between the fields of a line of `cargo tree`; in no package's name, licence or address.
const SEPARATOR: char = '\t';

/// A package at a version; there are no two of one name and version, since `deny.toml` allows one registry alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Id {
    name: String,
    version: String,
}

/// What cargo says about a package.
#[derive(Clone, Debug, Default)]
struct Package {
    /// SPDX expression; empty if the package names none.
    license: String,
    repository: String,
    needs: BTreeSet<Id>,
}

/// A program and the package that it is built from.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Name of the program.
    pub program: &'a str,
    /// Package of the workspace.
    pub package: &'a str,
    /// Its version.
    pub version: &'a str,
}

/// The packages of a workspace, with what they need and their checksums.
#[derive(Clone, Debug)]
pub struct Packages {
    packages: BTreeMap<Id, Package>,
    checksums: BTreeMap<Id, Option<String>>,
}

impl Packages {
    /// Asks cargo about the workspace in a directory.
    ///
    /// # Errors
    /// When cargo does not know, or `Cargo.lock` cannot be read.
    pub fn read(workspace: &Path) -> anyhow::Result<Self> {
        let mut packages = BTreeMap::new();
        for target in TARGETS {
            let output = Command::new("cargo")
                .args(["tree", "--workspace", "--locked", "--edges", "normal"])
                .args(["--target", target, "--prefix", "depth", "--format"])
                .arg(format!("{SEPARATOR}{{p}}{SEPARATOR}{{l}}{SEPARATOR}{{r}}"))
                .current_dir(workspace)
                .output()
                .context("cargo")?;
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                bail!("cargo tree for {target}: {}", error.trim());
            }
            read_tree(&String::from_utf8_lossy(&output.stdout), &mut packages)?;
        }
        let lock = workspace.join("Cargo.lock");
        let text = std::fs::read_to_string(&lock).with_context(|| lock.display().to_string())?;
        let checksums = checksums(&text).with_context(|| lock.display().to_string())?;
        Ok(Self {
            packages,
            checksums,
        })
    }

    /// Returns the bill of a program; `created_s` is the time that it names, in seconds since 1970.
    ///
    /// # Errors
    /// When the program's package is not of the workspace, or `Cargo.lock` lacks one that it needs.
    pub fn bill(&self, subject: &Subject, created_s: i64) -> anyhow::Result<Value> {
        let root = Id {
            name: subject.package.to_owned(),
            version: subject.version.to_owned(),
        };
        let mut components = Vec::new();
        let mut dependencies = Vec::new();
        let within = self.within(&root)?;
        for (id, package) in &within {
            let Some(checksum) = self.checksums.get(id) else {
                bail!(
                    "Cargo.lock has no package {} {}\n  run cargo check, which brings it up to date",
                    id.name,
                    id.version
                );
            };
            let needs: Vec<String> = package.needs.iter().map(purl).collect();
            dependencies.push(json!({"ref": purl(id), "dependsOn": needs}));
            if *id != root {
                components.push(component(id, package, checksum.as_deref()));
            }
        }
        Ok(json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": {
                "timestamp": created(created_s)?,
                "tools": {"components": [
                    {"type": "application", "name": "hearth-release", "version": env!("CARGO_PKG_VERSION")},
                ]},
                "component": {
                    "type": "application",
                    "bom-ref": purl(&root),
                    "name": subject.program,
                    "version": subject.version,
                    "purl": purl(&root),
                    "licenses": [{"expression": within[&root].license}],
                },
            },
            "components": components,
            "dependencies": dependencies,
        }))
    }

    /// A package with all that it needs, directly or not.
    fn within(&self, root: &Id) -> anyhow::Result<BTreeMap<Id, &Package>> {
        let mut within = BTreeMap::new();
        let mut left = vec![root];
        while let Some(id) = left.pop() {
            let Some(package) = self.packages.get(id) else {
                bail!(
                    "no package {} {} is in the workspace\n  run it in Hearth's source tree of that version",
                    id.name,
                    id.version
                );
            };
            if within.insert(id.clone(), package).is_none() {
                left.extend(&package.needs);
            }
        }
        Ok(within)
    }
}

/// Reads lines of `cargo tree --prefix depth` into packages and what each of them needs. A package's own needs are listed at
/// one of its lines, the others end with `(*)`.
fn read_tree(text: &str, packages: &mut BTreeMap<Id, Package>) -> anyhow::Result<()> {
    let mut above: Vec<Id> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let fields: Vec<&str> = line.split(SEPARATOR).collect();
        let [depth, package, license, repository] = fields[..] else {
            bail!("cargo tree says {line:?}, which is not what it was asked for");
        };
        let depth: usize = depth
            .parse()
            .with_context(|| format!("cargo tree says {line:?}"))?;
        let mut words = package.split(' ');
        let (Some(name), Some(version)) = (words.next(), words.next()) else {
            bail!("cargo tree says {line:?}, without a version");
        };
        let id = Id {
            name: name.to_owned(),
            version: version.trim_start_matches('v').to_owned(),
        };
        above.truncate(depth);
        if let Some(parent) = above.last().and_then(|parent| packages.get_mut(parent)) {
            parent.needs.insert(id.clone());
        }
        let found = packages.entry(id.clone()).or_default();
        // Before cargo knew SPDX, alternatives stood with a slash between them.
        let alternatives: Vec<&str> = license.split('/').map(str::trim).collect();
        found.license = alternatives.join(" OR ");
        // The mark of a line whose needs are listed elsewhere stands at its end.
        found.repository = repository.trim_end_matches(" (*)").to_owned();
        above.push(id);
    }
    Ok(())
}

/// Returns the checksums of a `Cargo.lock`; packages of the workspace have none.
fn checksums(text: &str) -> anyhow::Result<BTreeMap<Id, Option<String>>> {
    let document = Document::parse(text)?;
    let packages = document.get("package");
    let packages = packages.and_then(|packages| packages.as_array_of_tables());
    let packages = packages.context("there is no [[package]]")?;
    let mut checksums = BTreeMap::new();
    for package in packages {
        let field = |name: &str| {
            let value = package.get(name).and_then(|value| value.as_str());
            value.map(str::to_owned)
        };
        let (Some(name), Some(version)) = (field("name"), field("version")) else {
            bail!("a package lacks its name or version");
        };
        checksums.insert(Id { name, version }, field("checksum"));
    }
    Ok(checksums)
}

fn component(id: &Id, package: &Package, checksum: Option<&str>) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(id),
        "name": id.name,
        "version": id.version,
        "scope": "required",
        "purl": purl(id),
    });
    if let Some(checksum) = checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    if !package.license.is_empty() {
        component["licenses"] = json!([{"expression": package.license}]);
    }
    if !package.repository.is_empty() {
        component["externalReferences"] = json!([{"type": "vcs", "url": package.repository}]);
    }
    component
}

/// Package URL, in which only a version's `+` is no plain letter.
fn purl(id: &Id) -> String {
    format!("pkg:cargo/{}@{}", id.name, id.version.replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0\tother v1.0.0 (/x/other)\tMIT\t\n1\tshared v0.2.0+x\tMIT / Apache-2.0\thttps://s.test\n\n\
                        0\tmine v1.0.0 (/x/mine)\tMIT\t\n1\tmacros v0.1.0 (proc-macro)\tMIT\t\n2\tdeep v0.1.0\t\t\n\
                        1\tshared v0.2.0+x\tMIT/Apache-2.0\thttps://s.test (*)\n";
    const LOCK: &str = "[[package]]\nname = \"mine\"\nversion = \"1.0.0\"\n\n\
                        [[package]]\nname = \"other\"\nversion = \"1.0.0\"\n\n\
                        [[package]]\nname = \"deep\"\nversion = \"0.1.0\"\nchecksum = \"dd\"\n\n\
                        [[package]]\nname = \"macros\"\nversion = \"0.1.0\"\nchecksum = \"aa\"\n\n\
                        [[package]]\nname = \"shared\"\nversion = \"0.2.0+x\"\nchecksum = \"55\"\n";

    fn written(lock: &str) -> anyhow::Result<Value> {
        let mut packages = BTreeMap::new();
        read_tree(TREE, &mut packages)?;
        let packages = Packages {
            packages,
            checksums: checksums(lock)?,
        };
        let subject = Subject {
            program: "mine-program",
            package: "mine",
            version: "1.0.0",
        };
        packages.bill(&subject, 0)
    }

    #[test]
    fn a_bill_names_what_one_program_is_built_from() {
        let bill = written(LOCK).expect("a bill");
        let components = bill["components"].as_array().expect("components");
        let names: Vec<&str> = components
            .iter()
            .filter_map(|component| component["name"].as_str())
            .collect();
        assert_eq!(names, ["deep", "macros", "shared"]);
        let shared = &components[2];
        assert_eq!(shared["purl"], "pkg:cargo/shared@0.2.0%2Bx");
        assert_eq!(shared["hashes"][0]["content"], "55");
        assert_eq!(shared["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(shared["externalReferences"][0]["url"], "https://s.test");
        assert_eq!(components[0].get("licenses"), None);
        let needs = bill["dependencies"].as_array().expect("dependencies");
        let mine = needs
            .iter()
            .find(|needs| needs["ref"] == "pkg:cargo/mine@1.0.0")
            .expect("mine");
        let expected = ["pkg:cargo/macros@0.1.0", "pkg:cargo/shared@0.2.0%2Bx"];
        assert_eq!(mine["dependsOn"], json!(expected));
    }

    #[test]
    fn a_package_that_the_lock_lacks_is_named() {
        let (lock, _) = LOCK
            .split_once("[[package]]\nname = \"shared\"")
            .expect("a package");
        let error = written(lock).expect_err("a package is missing");
        assert!(error.to_string().contains("shared 0.2.0+x"), "{error}");
    }
}
