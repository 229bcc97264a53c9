//! Limits of a store of models, as agents and `fetch` take them.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hearth_crds::{DurationText, MemoryQuantity};
use hearth_fetch::Throttle;

/// Limits of a store of models. An empty value sets none.
// All may be set through the environment, so that older images start with a newer chart, and `hearth up` passes them on.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Most bytes of models and parts of them, such as 200Gi: the least recently used are removed to make room [default: none]
    #[arg(long, value_name = "SIZE", env = "HEARTH_MODEL_QUOTA",
        value_parser = |text: &str| amount("HEARTH_MODEL_QUOTA", text))]
    model_quota: Option<Amount>,
    /// Time after its last use for which a model is not removed to make room, such as 10m
    #[arg(
        long,
        value_name = "TIME",
        env = "HEARTH_MODEL_KEEP_RECENT",
        default_value = "10m"
    )]
    keep_recent: DurationText,
    /// Most bytes a second of all downloads together, such as 20Mi [default: none]
    #[arg(long, value_name = "SIZE", env = "HEARTH_DOWNLOAD_RATE",
        value_parser = |text: &str| amount("HEARTH_DOWNLOAD_RATE", text))]
    download_rate: Option<Amount>,
}

/// An amount of bytes, unless nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Amount(Option<NonZeroU64>);

impl StoreArgs {
    /// The quota in bytes, if there is one.
    pub(crate) fn quota_bytes(&self) -> Option<u64> {
        Some(self.model_quota?.0?.get())
    }

    /// Time for which what was used stays.
    pub(crate) fn recent(&self) -> Duration {
        self.keep_recent.get()
    }

    /// The limit of all downloads of this process, if there is one.
    pub(crate) fn throttle(&self) -> Option<Arc<Throttle>> {
        Some(Arc::new(Throttle::new(self.download_rate?.0?)))
    }
}

/// Reads an amount of bytes. Errors name the variable that may have given it, since `hearth` has no such options.
fn amount(variable: &str, text: &str) -> Result<Amount, String> {
    if text.is_empty() {
        return Ok(Amount(None));
    }
    let told = |why: String| format!("{why}; {variable} gives it too");
    let bytes: MemoryQuantity = text.parse().map_err(|error| told(format!("{error}")))?;
    match NonZeroU64::new(bytes.bytes()) {
        Some(bytes) => Ok(Amount(Some(bytes))),
        None => {
            let why = "it must be more than 0; leave it out for no limit";
            Err(told(why.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_amount_has_a_unit_and_is_not_zero() {
        let bytes = |text: &str| {
            let amount = amount("HEARTH_MODEL_QUOTA", text);
            amount.map(|amount| amount.0.map(NonZeroU64::get))
        };
        assert_eq!(bytes(""), Ok(None));
        assert_eq!(bytes("20Mi"), Ok(Some(20 << 20)));
        assert_eq!(bytes("1.5G"), Ok(Some(1_500_000_000)));
        for text in ["0", "-1", "many", "20 Mi"] {
            let refusal = bytes(text).unwrap_err();
            assert!(refusal.contains("HEARTH_MODEL_QUOTA"), "{refusal}");
        }
    }
}
