//! Checks of JSON schemas before a worker sees them, so that a wrong one is a 400 at once.

use std::panic::AssertUnwindSafe;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar, ValidationResult};
use llguidance::panic_utils;
use serde_json::Value;

use crate::error::ApiError;

/// Refuses a schema that cannot be made into a grammar.
///
/// # Errors
/// 400 at `param` with the compiler's reason.
pub(crate) fn check(schema: &Value, param: &str) -> Result<(), ApiError> {
    let schema = schema.clone();
    let checked = panic_utils::catch_unwind(AssertUnwindSafe(|| {
        let limits = ParserLimits {
            verbose_errors: false,
            ..ParserLimits::default()
        };
        let grammar = GrammarInit::Serialized(TopLevelGrammar::from_json_schema(schema));
        Ok(grammar.validate(None, limits))
    }));
    let reason = match checked {
        Ok(ValidationResult::Error(reason)) => reason,
        Ok(_) => return Ok(()),
        Err(error) => error.to_string(),
    };
    let reason = reason
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default()
        .trim();
    Err(ApiError::parameter(
        param,
        format!("'{param}' is not a JSON schema that can be followed: {reason}"),
    )
    .with_code("invalid_json_schema"))
}
