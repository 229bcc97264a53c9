//! Encoding of what a digest is computed from.

use std::fmt::Display;

/// Keys with their values, each with its length, so that different contents never have the same encoding.
#[derive(Default)]
pub(super) struct Lines(String);

impl Lines {
    pub(super) fn into_text(self) -> String {
        self.0
    }

    pub(super) fn put(&mut self, key: &str, value: impl Display) {
        let value = value.to_string();
        self.0 += &format!("{key} {} {value}\n", value.len());
    }

    pub(super) fn put_if(&mut self, is_there: bool, key: &str, value: impl Display) {
        if is_there {
            self.put(key, value);
        }
    }

    pub(super) fn put_some(&mut self, key: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }
}
