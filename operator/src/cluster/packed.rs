//! Values that are kept by the thousand and rarely read.

use std::io::{Read as _, Write as _};
use std::marker::PhantomData;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value as deflated JSON: a single allocation, a third of the size of the JSON, and a sixth of the size of the
/// value with all its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed<T> {
    deflated: Box<[u8]>,
    may_be_fetched: bool,
    of: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Packed<T> {
    /// Packs a value.
    ///
    /// # Errors
    /// The value cannot be serialised as JSON.
    pub(crate) fn new(value: &T) -> serde_json::Result<Self> {
        let json = serde_json::to_string(value)?;
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        let deflated = encoder
            .write_all(json.as_bytes())
            .and_then(|()| encoder.finish());
        Ok(Self {
            deflated: deflated.map_err(serde_json::Error::io)?.into(),
            may_be_fetched: FETCHED.iter().any(|word| is_word(&json, word)),
            of: PhantomData,
        })
    }

    /// Unpacks the value.
    ///
    /// # Errors
    /// The packed data cannot be read.
    pub(crate) fn get(&self) -> serde_json::Result<T> {
        let mut json = Vec::new();
        let read = DeflateDecoder::new(&*self.deflated).read_to_end(&mut json);
        read.map_err(serde_json::Error::io)?;
        serde_json::from_slice(&json)
    }

    /// Whether its model may be a fetched one, because the name of such a source occurs somewhere in it, or of the field that has
    /// its name in stores: most values need not be unpacked to rule that out.
    pub(crate) fn may_be_fetched(&self) -> bool {
        self.may_be_fetched
    }
}

/// Words that occur in the JSON of everything whose model is fetched.
const FETCHED: [&str; 3] = ["http", "huggingFace", "modelKey"];

/// Whether a word occurs in JSON as a whole string, or as one in JSON nested in a string.
fn is_word(json: &str, word: &str) -> bool {
    let [plain, within] = [format!("\"{word}\""), format!("\\\"{word}\\\"")];
    json.contains(&plain) || json.contains(&within)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_value_comes_back_as_it_was() {
        let value = json!({"ranks": vec![json!({"node": "a", "cpus": [1, 2, 3]}); 20]});
        let packed = Packed::new(&value).unwrap();
        assert_eq!(packed.get().unwrap(), value);
        assert!(packed.deflated.len() * 3 < value.to_string().len());
        assert_eq!(packed, Packed::new(&value).unwrap());
        assert_ne!(packed, Packed::<Value>::new(&json!({})).unwrap());
    }

    #[test]
    fn a_fetched_model_is_told_without_unpacking() {
        let source = json!({"source": {"http": {"url": "http://nas.lan/m.tar"}}});
        let within = json!({"note": source.to_string()});
        let hub = json!({"source": {"huggingFace": {"repo": "a/b"}}});
        let plan = json!({"inputs": {"modelKey": "0123"}});
        let other = json!({"source": {"hostPath": {"path": "/models/http"}}});
        for (value, is_fetched) in [
            (&source, true),
            (&within, true),
            (&hub, true),
            (&plan, true),
            (&other, false),
        ] {
            let packed = Packed::<Value>::new(value).unwrap();
            assert_eq!(packed.may_be_fetched(), is_fetched, "{value}");
        }
    }
}
