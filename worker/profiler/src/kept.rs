//! Rates measured at a quiet moment, stored in a file, so that predictions do not follow the momentary load.

use std::fs;
use std::io;
use std::path::Path;

use hearth_crds::NodeProfileStatus;
use serde::{Deserialize, Serialize};

use crate::tree::Tree;
use crate::{
    Measured, Meter, ProfileError, ProfileOptions, disk, hardware, measure, observe, take_rates,
};

/// Age in days beyond which rates are measured again.
const MOST_DAYS: i64 = 7;

/// A profile and the hardware it belongs to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Hardware that the rates were measured on, see [`hardware`].
    pub hardware: String,
    /// The measured profile.
    pub profile: NodeProfileStatus,
}

impl Kept {
    /// Reads a file; `None` if it is missing or was written by another version.
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

    /// Writes to a temporary file and renames it, so that readers never see half a file.
    ///
    /// # Errors
    /// Errors of the file system.
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

/// Returns the profile with the rates stored in `file` for this hardware. Missing or old rates are measured, and
/// stored if the machine is quiet; if it is busy, old ones are used. `anew` forces a measurement.
///
/// # Errors
/// Same as [`measure`].
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
        // The disks of other directories keep their rates.
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

/// Adds rates that were measured before to an observed profile; a new disk is measured.
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
