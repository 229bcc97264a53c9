//! Power limits as NVIDIA's management library reads and sets them.

use std::fmt;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::policy::Bounds;

/// A GPU of this node.
pub(super) struct Gpu<'nvml> {
    device: Device<'nvml>,
    name: String,
    uuid: String,
    /// Whether it says how busy it is. One that does not, or cannot at the moment, counts as busy.
    pub(super) reports_work: bool,
}

/// What is read of a GPU again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// The power limit in force.
    pub(super) milliwatts: u32,
    /// Whether it computed or copied within the driver's last sample, of at most a second.
    pub(super) works: bool,
}

/// How many GPUs this node has; `None` if there is none.
pub(super) fn count(nvml: &Nvml) -> Option<u32> {
    nvml.device_count().ok().filter(|count| *count > 0)
}

pub(super) fn gpu(nvml: &Nvml, index: u32) -> Result<Gpu<'_>, NvmlError> {
    let device = nvml.device_by_index(index)?;
    Ok(Gpu {
        name: device.name()?,
        uuid: device.uuid()?,
        reports_work: !device.utilization_rates().is_err_and(|it| is_lacking(&it)),
        device,
    })
}

impl Gpu<'_> {
    pub(super) fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The default limit, and those that can be set.
    pub(super) fn bounds(&self) -> Result<Bounds, NvmlError> {
        let settable = self.device.power_management_limit_constraints()?;
        Ok(Bounds {
            default_milliwatts: self.device.power_management_limit_default()?,
            least_milliwatts: settable.min_limit,
            most_milliwatts: settable.max_limit,
        })
    }

    pub(super) fn read(&self) -> Result<Reading, NvmlError> {
        let busy = self.reports_work.then(|| self.device.utilization_rates());
        let works = match busy {
            Some(Ok(busy)) => busy.gpu > 0 || busy.memory > 0,
            // Who cannot say it may well be at work.
            Some(Err(_)) | None => true,
        };
        Ok(Reading {
            milliwatts: self.device.power_management_limit()?,
            works,
        })
    }

    /// Sets the limit; returns the one that is in force then, which the driver may have rounded.
    pub(super) fn set(&mut self, milliwatts: u32) -> Result<u32, NvmlError> {
        self.device.set_power_management_limit(milliwatts)?;
        Ok(self.device.power_management_limit().unwrap_or(milliwatts))
    }
}

impl fmt::Display for Gpu<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}

/// Whether asking again is in vain.
pub(super) fn is_final(error: &NvmlError) -> bool {
    is_lacking(error) || matches!(error, NvmlError::NoPermission)
}

/// Whether the device or its driver lacks what was asked for, now and later.
pub(super) fn is_lacking(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)
    )
}
