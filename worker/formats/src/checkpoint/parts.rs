//! What is stored under a name: a tensor and, for a matrix of FP8, its scales in a tensor of their own.

use std::collections::HashSet;

use super::{Checkpoint, TensorInfo};
use crate::FormatError;

/// End of the name of a matrix's scales, as DeepSeek and Qwen publish them.
const SCALES_SUFFIX: &str = "_scale_inv";

/// Returns the name of a matrix's scales.
pub(crate) fn scales_name(matrix: &str) -> String {
    format!("{matrix}{SCALES_SUFFIX}")
}

/// Returns the name of the matrix whose scales `name` holds; `None` if it is not a name of scales.
pub(crate) fn matrix_of_scales(name: &str) -> Option<&str> {
    name.strip_suffix(SCALES_SUFFIX)
}

impl Checkpoint {
    /// Type, shape and location of everything stored under a name: the tensor itself, then its scales if it has any.
    ///
    /// # Errors
    /// [`FormatError::Missing`] if there is no such tensor. Scales that a matrix lacks are an error of
    /// [`Checkpoint::check_matrix`], which knows that it needs them.
    pub fn parts(&self, name: &str) -> Result<Vec<TensorInfo<'_>>, FormatError> {
        self.find(name)?;
        let names = [name, &scales_name(name)];
        Ok(names
            .into_iter()
            .filter_map(|name| self.tensor_info(name))
            .collect())
    }

    /// Size in bytes of everything stored under a name: the tensor itself, and its scales if it has any.
    ///
    /// # Errors
    /// Same as [`Checkpoint::parts`].
    pub fn stored_bytes(&self, name: &str) -> Result<u64, FormatError> {
        let parts = self.parts(name)?;
        Ok(parts.iter().map(|part| part.size_bytes).sum())
    }

    /// Names of the tensors that are not in `used`, sorted; scales are used where their matrix is.
    pub fn unused(&self, used: &HashSet<&str>) -> impl Iterator<Item = &str> {
        self.names()
            .filter(|name| !used.contains(matrix_of_scales(name).unwrap_or(name)))
    }
}
