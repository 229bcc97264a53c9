//! Rates of a quiet moment, kept in a file: predictions do not follow the load of the moment.

use std::fs;
use std::io;
use std::path::Path;

use hearth_crds::NodeProfileStatus;
use serde::{Deserialize, Serialize};

use crate::tree::Tree;
use crate::{
    Measured, Meter, ProfileError, ProfileOptions, disk, hardware, measure, observe, take_rates,
};

/// Older rates are measured again, in a quiet moment.
const MOST_DAYS: i64 = 7;

/// A profile, and the machine that it is of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Hardware that the rates were measured on: [`hardware`].
    pub hardware: String,
    /// The profile as it was measured.
    pub profile: NodeProfileStatus,
}

impl Kept {
    /// What a file keeps; `None` where it is missing or of another version.
    pub fn read(path: &Path) -> Option<Self> {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("{}: {error}: measuring again", path.display());
                return None;
            }
        };
        let kept = serde_json::from_slice(&text);
        kept.inspect_err(|error| tracing::info!("{}: {error}: measuring again", path.display()))
            .ok()
    }

    /// Written beside and renamed, so that nobody reads half a file.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let beside = path.with_extension(format!("json-{}", std::process::id()));
        fs::write(&beside, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&beside, path)
    }

    fn is_recent(&self) -> bool {
        let measured: Result<jiff::Timestamp, _> = self.profile.measured_at.parse();
        measured.is_ok_and(|at| {
            let age = jiff::Timestamp::now().as_second() - at.as_second();
            age < MOST_DAYS * 24 * 3600
        })
    }
}

/// The profile with the rates that `file` keeps of this hardware. They are measured where there are none or old ones, and kept
/// when the moment is quiet; a busy one falls back to old ones. `anew`: measured in any case.
///
/// # Errors
/// As [`measure`].
pub fn measure_once(
    options: &ProfileOptions,
    meter: &dyn Meter,
    file: &Path,
    anew: bool,
) -> Result<Measured, ProfileError> {
    let observed = observe(options)?;
    let hardware = hardware(&observed.profile, &options.root);
    let kept = Kept::read(file).filter(|kept| kept.hardware == hardware);
    if let Some(kept) = kept.clone().filter(|kept| !anew && kept.is_recent()) {
        return Ok(with_rates(observed, kept, options, meter, file));
    }
    let mut measured = measure(options, meter)?;
    if measured.profile.busy_percent.is_none() {
        let mut profile = measured.profile.clone();
        // Other directories' disks are as fast as they were.
        let known = kept.map(|kept| kept.profile.disks).unwrap_or_default();
        let is_other = |path: &str| profile.disks.iter().all(|disk| disk.path != path);
        let others: Vec<_> = known.into_iter().filter(|d| is_other(&d.path)).collect();
        profile.disks.extend(others);
        let kept = Kept { hardware, profile };
        write_or_warn(&kept, file, &mut measured.warnings);
        return Ok(measured);
    }
    Ok(match kept.filter(|_| !anew) {
        Some(kept) => with_rates(observed, kept, options, meter, file),
        None => measured,
    })
}

/// What was observed with rates that were measured before; a disk that is new is measured.
fn with_rates(
    observed: Measured,
    mut kept: Kept,
    options: &ProfileOptions,
    meter: &dyn Meter,
    file: &Path,
) -> Measured {
    let Measured {
        mut profile,
        mut warnings,
    } = observed;
    take_rates(&mut profile, &kept.profile);
    let is_unknown = profile.disks.iter().any(|disk| disk.read_gbps == 0.0);
    if let Some(directory) = options.disk.as_deref().filter(|_| is_unknown) {
        let tree = Tree::new(&options.root);
        meter.tell(&format!("reads of the disk below {}", directory.display()));
        let measured = disk::measure(&tree, directory, options.probe_disk);
        profile.disks = measured.into_iter().collect();
        kept.profile.disks.extend(profile.disks.iter().cloned());
        warnings.extend(tree.into_warnings());
        write_or_warn(&kept, file, &mut warnings);
    }
    Measured { profile, warnings }
}

fn write_or_warn(kept: &Kept, file: &Path, warnings: &mut Vec<String>) {
    if let Err(error) = kept.write(file) {
        let path = file.display();
        warnings.push(format!("{path}: {error}: the rates are not kept"));
    }
}
