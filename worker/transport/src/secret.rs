//! `Debug` for messages that contain secrets, without the secrets.

use std::fmt;

use crate::v1::{Credentials, IdentifyResponse};

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl fmt::Debug for IdentifyResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdentifyResponse").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let credentials = Credentials {
            username: "ann".to_owned(),
            password: "pw".to_owned(),
            token: "pw".to_owned(),
        };
        let text = format!("{credentials:?}");
        assert!(!text.contains("pw") && !text.contains("ann"), "{text}");
        let identity = IdentifyResponse {
            token: "pw".to_owned(),
            public_key: "PEM".to_owned(),
        };
        let text = format!("{identity:?}");
        assert!(!text.contains("pw"), "{text}");
    }
}
