//! Reading of plans and routes written by another version of the program.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Highest `minVersion` of plans and routes that this program reads. It is raised when a field is added that no reader
/// may ignore; a plan or routes that use such a field carry the number as `minVersion`.
///
/// Version 2: a rank's experts may be streamed or computed by CPUs (`residency`), in two half batches (`dualBatch`), and its
/// GPU may be a virtual one (`virtualDevice`). Version 3: its dense modules may stream with its experts (`streamsDense`),
/// or only some of its experts be in memory at a time (`hostBudgetBytes`). Version 4: it may be one of a ring (`ring`).
/// Version 5: it may be one of peers (`peers`).
pub const READER_VERSION: u32 = 5;
/// The first version that reads `streamsDense` and `hostBudgetBytes`.
pub const STREAMED_DENSE_VERSION: u32 = 3;
/// The first version that reads `ring`.
pub const RING_VERSION: u32 = 4;
/// The first version that reads `peers`.
pub const PEERS_VERSION: u32 = 5;

/// Reason a plan or routes cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Written for a newer reader; carries its `minVersion`.
    #[error(
        "minVersion is {0}, and this program reads up to {READER_VERSION}\n  \
         run it in a newer version (in a cluster: image.workerTag of the chart), or plan again with the operator of this one"
    )]
    TooNew(u32),
    /// Not JSON, or a field is missing or has another type.
    #[error(transparent)]
    Malformed(#[from] serde_json::Error),
}

/// Reads a plan or routes from JSON. Fields added by a newer writer are ignored.
///
/// # Errors
/// [`ReadError::TooNew`] if the writer requires a newer reader, whatever else is in the text.
pub fn read_versioned<T: DeserializeOwned>(text: &[u8]) -> Result<T, ReadError> {
    check(serde_json::from_slice(text))?;
    Ok(serde_json::from_slice(text)?)
}

/// Like [`read_versioned`], for JSON that is already parsed.
///
/// # Errors
/// As [`read_versioned`].
pub fn read_versioned_value<T: DeserializeOwned>(value: Value) -> Result<T, ReadError> {
    check(Version::deserialize(&value))?;
    Ok(serde_json::from_value(value)?)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Version {
    #[serde(default)]
    min_version: u32,
}

fn check(version: serde_json::Result<Version>) -> Result<(), ReadError> {
    match version {
        Ok(Version { min_version }) if min_version > READER_VERSION => {
            Err(ReadError::TooNew(min_version))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanRouting, Routes};

    #[test]
    fn fields_of_a_newer_writer_are_passed_over() {
        let text = br#"{"chunkedBelowTokens": 1, "maxQueue": 2, "queueTimeoutMs": 3, "fairness": {"by": "user"}}"#;
        let routing: PlanRouting = read_versioned(text).unwrap();
        assert_eq!(routing.max_queue, 2);
    }

    #[test]
    fn a_newer_version_is_refused_with_words_whatever_else_it_says() {
        let text = br#"{"minVersion": 9, "workers": "by lot"}"#;
        let error = read_versioned::<Routes>(text).unwrap_err();
        assert!(matches!(error, ReadError::TooNew(9)));
        let value = serde_json::from_slice(text).unwrap();
        let same = read_versioned_value::<Routes>(value).unwrap_err();
        assert!(matches!(same, ReadError::TooNew(9)));
        let words = error.to_string();
        assert!(
            words.contains(&format!("reads up to {READER_VERSION}"))
                && words.contains("image.workerTag"),
            "{words}"
        );
        let same = format!(r#"{{"minVersion": {READER_VERSION}, "workers": []}}"#);
        assert!(read_versioned::<Routes>(same.as_bytes()).is_ok());
        let nonsense = read_versioned::<Routes>(br#"{"minVersion": 1}"#).unwrap_err();
        assert!(nonsense.to_string().contains("workers"), "{nonsense}");
    }
}
