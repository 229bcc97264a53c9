//! What an ELF program says about itself: the platform that it is for, and the libraries that it loads.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, elf};

/// A platform that images are made for; all run Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Platform {
    /// x86-64.
    Amd64,
    /// 64-bit ARM.
    Arm64,
}

impl Platform {
    /// The platform of this machine; `None` if no images are made for it.
    pub fn of_machine() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::Amd64),
            "aarch64" => Some(Self::Arm64),
            _ => None,
        }
    }

    /// Its architecture in the words of OCI and of container engines.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Its C toolchain's name, which Debian names directories of libraries and binutils by.
    pub fn gnu(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-linux-gnu",
            Self::Arm64 => "aarch64-linux-gnu",
        }
    }

    /// Returns where a library for this platform is on this machine: where the cross toolchain has it, or the system, which
    /// may have libraries of several platforms.
    ///
    /// # Errors
    /// When it is nowhere.
    pub fn library(self, name: &str) -> anyhow::Result<PathBuf> {
        let gnu = self.gnu();
        let directories = [
            format!("/usr/{gnu}/lib"),
            format!("/lib/{gnu}"),
            format!("/usr/lib/{gnu}"),
        ];
        let mut paths = directories
            .iter()
            .map(|directory| Path::new(directory).join(name));
        paths.find(|path| path.is_file()).with_context(|| {
            format!(
                "{name} for {} is in none of {}\n  install the cross toolchain: Debian's crossbuild-essential-{}",
                self.architecture(),
                directories.join(", "),
                self.architecture()
            )
        })
    }
}

/// An ELF program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elf {
    /// What it runs on.
    pub platform: Platform,
    /// Path of its dynamic loader; `None` of a static program.
    pub loader: Option<String>,
    /// Names of the libraries that it loads, without those that they load in turn.
    pub needed: Vec<String>,
    /// Whether it has a symbol table, which `strip` would remove.
    pub has_symbols: bool,
}

impl Elf {
    /// Reads what a program says; `shown` names it in messages.
    ///
    /// # Errors
    /// When it is no 64-bit ELF file, or is for a machine that no images are made for.
    pub fn parse(bytes: &[u8], shown: &Path) -> anyhow::Result<Self> {
        let unreadable = || {
            format!(
                "{} is no 64-bit ELF program\n  images hold programs that were built for Linux",
                shown.display()
            )
        };
        let file = ElfFile64::<Endianness>::parse(bytes).with_context(unreadable)?;
        let endian = file.endian();
        let platform = match file.elf_header().e_machine(endian) {
            elf::EM_X86_64 => Platform::Amd64,
            elf::EM_AARCH64 => Platform::Arm64,
            other => bail!(
                "{} is for ELF machine {other}\n  images are made for x86-64 (62) and 64-bit ARM (183)",
                shown.display()
            ),
        };
        let mut loader = None;
        for segment in file.elf_program_headers() {
            let path = segment.interpreter(endian, bytes);
            if let Some(path) = path.with_context(unreadable)? {
                loader = Some(String::from_utf8_lossy(path).into_owned());
            }
        }
        let table = file.elf_dynamic_table().with_context(unreadable)?;
        let mut needed = Vec::new();
        for entry in table.iter().filter(|entry| entry.tag == elf::DT_NEEDED) {
            let name = table.string(entry).with_context(unreadable)?;
            needed.push(String::from_utf8_lossy(name).into_owned());
        }
        Ok(Self {
            platform,
            loader,
            needed,
            has_symbols: !file.elf_symbol_table().is_empty(),
        })
    }

    /// Returns what a program for another platform loads, directly or not, by this machine's path and by its path in an
    /// image, which is where `loader`, the program's own, looks.
    ///
    /// # Errors
    /// When a library is not on this machine or cannot be read.
    pub(crate) fn foreign_libraries(
        &self,
        loader: &Path,
    ) -> anyhow::Result<Vec<(PathBuf, PathBuf)>> {
        let loader_name = loader.file_name().unwrap_or_default().to_string_lossy();
        let from = self.platform.library(&loader_name)?;
        let mut libraries = vec![(from, loader.to_path_buf())];
        let mut seen = BTreeSet::from([loader_name.into_owned()]);
        let mut left = self.needed.clone();
        while let Some(name) = left.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            let from = self.platform.library(&name)?;
            let bytes = std::fs::read(&from).with_context(|| from.display().to_string())?;
            left.extend(Self::parse(&bytes, &from)?.needed);
            let inside = Path::new("/lib").join(self.platform.gnu()).join(&name);
            libraries.push((from, inside));
        }
        Ok(libraries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_says_what_it_runs_on_and_loads() {
        let path = std::env::current_exe().expect("this program");
        let bytes = std::fs::read(&path).expect("this program");
        let program = Elf::parse(&bytes, &path).expect("an ELF program");
        assert_eq!(Some(program.platform), Platform::of_machine());
        assert!(program.has_symbols);
        assert!(program.loader.expect("a loader").contains("ld-linux"));
        assert!(program.needed.iter().any(|name| name == "libc.so.6"));
    }

    #[test]
    fn other_files_and_machines_are_refused_by_name() {
        let refused = |bytes: &[u8]| {
            let error = Elf::parse(bytes, Path::new("/x/program")).expect_err("refused");
            format!("{error:#}")
        };
        let error = refused(b"#!/bin/sh\n");
        assert!(error.contains("/x/program is no 64-bit ELF"), "{error}");
        let path = std::env::current_exe().expect("this program");
        let mut bytes = std::fs::read(&path).expect("this program");
        bytes[18..20].copy_from_slice(&243_u16.to_le_bytes());
        let error = refused(&bytes);
        assert!(error.contains("machine 243"), "{error}");
    }
}
