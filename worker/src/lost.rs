//! What a worker says about a device that no longer answers.

use std::process::ExitCode;

use hearth_crds::DEVICE_LOST_EXIT_CODE;
use hearth_kernels::KernelError;
use hearth_model::ModelError;

/// The device of a worker was lost while it served, with the message of its backend.
#[derive(Debug)]
pub(crate) struct DeviceLost(pub(crate) String);

impl std::fmt::Display for DeviceLost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DeviceLost {}

/// Exit code of a process that ends with this error: what started it learns from the code that a device is lost.
pub(crate) fn exit_code(error: &anyhow::Error) -> ExitCode {
    let is_lost = |cause: &(dyn std::error::Error + 'static)| {
        let of_kernel = cause.downcast_ref::<KernelError>();
        let of_model = cause.downcast_ref::<ModelError>();
        cause.is::<DeviceLost>()
            || matches!(of_kernel, Some(KernelError::DeviceLost { .. }))
            || of_model.is_some_and(ModelError::is_device_lost)
    };
    match error.chain().any(is_lost) {
        true => ExitCode::from(DEVICE_LOST_EXIT_CODE),
        false => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_lost_device_has_an_exit_code_of_its_own() {
        let lost = || KernelError::DeviceLost {
            device: "cuda".to_owned(),
            detail: "cuMemAlloc: CUDA_ERROR_UNKNOWN".to_owned(),
        };
        let code = |error: anyhow::Error| format!("{:?}", exit_code(&error));
        let expected = format!("{:?}", ExitCode::from(DEVICE_LOST_EXIT_CODE));
        let opening: anyhow::Result<()> = Err(lost()).context("the device cannot be opened");
        assert_eq!(code(opening.expect_err("an error")), expected);
        assert_eq!(code(ModelError::from(lost()).into()), expected);
        assert_eq!(
            code(DeviceLost("it fell off the bus".to_owned()).into()),
            expected
        );
        let other = format!("{:?}", ExitCode::FAILURE);
        assert_eq!(code(anyhow::anyhow!("no such file")), other);
    }
}
