//! The list of a repository's files, or one that somebody wrote, and those of them that are needed to serve the model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use reqwest::StatusCode;
use serde::Deserialize;

use crate::answer::{Failure, refusal};
use crate::digest::Digest;
use crate::line::{Here, Line, Tried};
use crate::source::{ListedFile, is_commit};
use crate::{FetchError, Phase};

/// Maximum size of the list: some ten thousand files.
const MAX_LISTING_BYTES: usize = 32 << 20;
/// Maximum size of the index of weights, as when it is read for serving.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Maximum length of a file's name.
pub(crate) const MAX_NAME_BYTES: usize = 255;

/// The files that are read besides the weights: what is not among them is not fetched.
const BESIDE: [&str; 6] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
];
const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
/// The file that says which weights are in which file.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const ENDING: &str = ".safetensors";

/// Remedy for a list of files without a model.
pub(crate) const LIST_REMEDY: &str = "list all files of the model: config.json, the tokenizer, and the weights as safetensors with their index";

/// A file of the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubFile {
    /// Its path in the repository, one of a few known ones or a plain name.
    pub(crate) path: String,
    /// Its length; 0 in a list that does not tell.
    pub(crate) bytes: u64,
    pub(crate) digest: Digest,
}

/// A repository's files at one commit, or those of a list.
#[derive(Debug)]
pub(crate) struct Listing {
    /// Repository and revision, for errors.
    shown: String,
    /// URL, for errors.
    url: String,
    /// Remedy for whatever a list lacks; `None` for a repository, where it depends.
    remedy: Option<&'static str>,
    siblings: BTreeMap<String, Sibling>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

/// What the hub says about a large file, which git only names.
#[derive(Debug, Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Listing {
    /// Asks the hub for the list, and returns it with its commit. `shown` is repository and revision.
    ///
    /// # Errors
    /// The errors of [`crate::fetch`] that network and server cause.
    pub(crate) async fn ask(line: &Line<'_>, shown: &str) -> Result<(Self, String), FetchError> {
        let mut tried = Tried {
            failures: 0,
            idle_since: Instant::now(),
        };
        line.check_url()?;
        loop {
            line.reporter.tell(Phase::Connecting, 0, None);
            match attempt(line, tried.idle_since).await {
                Ok(body) => return Self::read(&body, shown, &line.place.shown),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Lost { reason, asked }) => {
                    tried.failures += 1;
                    line.wait(Here::default(), tried, reason, asked).await?;
                }
            }
        }
    }

    /// The files of a list, whose sizes nobody knows: they count as 0. `shown` is where they are.
    pub(crate) fn of_files(shown: String, files: &[ListedFile]) -> Self {
        let sibling = |file: &ListedFile| Sibling {
            rfilename: file.path.clone(),
            size: None,
            blob_id: None,
            lfs: Some(Lfs {
                sha256: file.sha256.clone(),
                size: 0,
            }),
        };
        Self {
            url: shown.clone(),
            shown,
            remedy: Some(LIST_REMEDY),
            siblings: files
                .iter()
                .map(|file| (file.path.clone(), sibling(file)))
                .collect(),
        }
    }

    fn read(body: &[u8], shown: &str, url: &str) -> Result<(Self, String), FetchError> {
        let refused = |reason: String| FetchError::Listing {
            url: url.to_owned(),
            reason: short(&reason),
        };
        let Answer { sha, siblings } =
            serde_json::from_slice(body).map_err(|error| refused(error.to_string()))?;
        if !is_commit(&sha) {
            return Err(refused("its sha is not the name of a commit".to_owned()));
        }
        let named = siblings.into_iter();
        let listing = Self {
            shown: shown.to_owned(),
            url: url.to_owned(),
            remedy: None,
            siblings: named
                .map(|sibling| (sibling.rfilename.clone(), sibling))
                .collect(),
        };
        Ok((listing, sha))
    }

    /// The index of the weights, if they are named by one: a single file needs none.
    ///
    /// # Errors
    /// [`FetchError::Listing`].
    pub(crate) fn index(&self) -> Result<Option<HubFile>, FetchError> {
        if self.siblings.contains_key(SINGLE) || !self.siblings.contains_key(INDEX) {
            return Ok(None);
        }
        let index = self.file(INDEX)?;
        if index.bytes > MAX_INDEX_BYTES {
            return Err(self.refused(format!("{INDEX} has {} bytes", index.bytes)));
        }
        Ok(Some(index))
    }

    /// The files to fetch, the small ones first. `index` is the content of the index, if there is one.
    ///
    /// # Errors
    /// [`FetchError::NotAModel`], [`FetchError::Listing`].
    pub(crate) fn needed(
        &self,
        index: Option<&[u8]>,
        max_files: u64,
    ) -> Result<Vec<HubFile>, FetchError> {
        self.check_config()?;
        let weights = match index {
            Some(index) => self.shards(index)?,
            None => BTreeSet::from([self.only_weights()?]),
        };
        let mut names: Vec<&str> = BESIDE.to_vec();
        names.extend(index.map(|_| INDEX));
        names.retain(|name| self.siblings.contains_key(*name));
        names.extend(weights.iter().map(String::as_str));
        if names.len() as u64 > max_files {
            return Err(self.refused(format!("more than {max_files} files are needed")));
        }
        names.into_iter().map(|name| self.file(name)).collect()
    }

    /// Checks that it may be a model's.
    ///
    /// # Errors
    /// [`FetchError::NotAModel`].
    pub(crate) fn check_config(&self) -> Result<(), FetchError> {
        match self.siblings.contains_key(CONFIG) {
            true => Ok(()),
            false => Err(self.no_model(
                format!("{CONFIG} is not in it"),
                "name a repository with a model's config.json and its weights as safetensors",
            )),
        }
    }

    /// The files that the index names.
    fn shards(&self, index: &[u8]) -> Result<BTreeSet<String>, FetchError> {
        const REMEDY: &str =
            "name another repository or revision: this one was not uploaded completely";
        let index: Index = serde_json::from_slice(index)
            .map_err(|error| self.no_model(format!("{INDEX} cannot be read: {error}"), REMEDY))?;
        let names: BTreeSet<String> = index.weight_map.into_values().collect();
        if names.is_empty() {
            return Err(self.no_model(format!("{INDEX} names no weights"), REMEDY));
        }
        for name in &names {
            if !is_plain(name) || !name.ends_with(ENDING) {
                let reason = format!("{INDEX} names {name:?}, which is not a file beside it");
                return Err(self.no_model(reason, REMEDY));
            }
            if !self.siblings.contains_key(name) {
                let reason = format!("{INDEX} names {name}, which is not in it");
                return Err(self.no_model(reason, REMEDY));
            }
        }
        Ok(names)
    }

    /// The only file of weights.
    fn only_weights(&self) -> Result<String, FetchError> {
        if self.siblings.contains_key(SINGLE) {
            return Ok(SINGLE.to_owned());
        }
        let names = self.siblings.keys();
        let mut found = names.filter(|name| is_plain(name) && name.ends_with(ENDING));
        match (found.next(), found.next()) {
            (Some(only), None) => Ok(only.clone()),
            (Some(first), Some(second)) => Err(self.no_model(
                format!("{INDEX} is not in it, and {first} and {second} are"),
                "name another repository or revision: the index says which weights belong to the model",
            )),
            (None, _) => {
                let other = self.siblings.keys().find(|name| {
                    let endings = [".gguf", ".bin", ".pt", ".pth"];
                    endings.iter().any(|ending| name.ends_with(ending))
                });
                let reason = match other {
                    Some(other) => format!("{other} is in it, and no safetensors weights"),
                    None => "no weights are in it".to_owned(),
                };
                Err(self.no_model(reason, "name the repository with the model's safetensors weights"))
            }
        }
    }

    /// Size and checksum of a file.
    fn file(&self, path: &str) -> Result<HubFile, FetchError> {
        let unknown = || self.refused(format!("it tells no size and checksum of {path}"));
        let sibling = self.siblings.get(path).ok_or_else(unknown)?;
        let (bytes, digest) = match (&sibling.lfs, &sibling.blob_id, sibling.size) {
            (Some(lfs), _, _) if is_digits(&lfs.sha256, 64) => {
                (lfs.size, Digest::Sha256(lfs.sha256.clone()))
            }
            (None, Some(sha1), Some(bytes)) if is_digits(sha1, 40) => {
                let sha1 = sha1.clone();
                (bytes, Digest::GitBlob { sha1, bytes })
            }
            _ => return Err(unknown()),
        };
        Ok(HubFile {
            path: path.to_owned(),
            bytes,
            digest,
        })
    }

    /// Bytes of all files.
    ///
    /// # Errors
    /// [`FetchError::Listing`] if they are more than there can be.
    pub(crate) fn sum_bytes(&self, files: &[HubFile]) -> Result<u64, FetchError> {
        let mut sizes = files.iter().map(|file| file.bytes);
        let sum = sizes.try_fold(0_u64, u64::checked_add);
        sum.ok_or_else(|| self.refused("its files are larger than any disk".to_owned()))
    }

    pub(crate) fn refused(&self, reason: String) -> FetchError {
        FetchError::Listing {
            url: self.url.clone(),
            reason: short(&reason),
        }
    }

    /// `remedy` is for a repository.
    fn no_model(&self, reason: String, remedy: &'static str) -> FetchError {
        FetchError::NotAModel {
            repo: self.shown.clone(),
            reason: short(&reason),
            remedy: self.remedy.unwrap_or(remedy),
        }
    }
}

/// A reason that quotes what the hub or a repository says, fit to be shown: of bounded length, and without control characters.
fn short(reason: &str) -> String {
    const MOST_CHARS: usize = 300;
    let shown = reason
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c });
    let mut text: String = shown.take(MOST_CHARS).collect();
    if reason.chars().nth(MOST_CHARS).is_some() {
        text.push('…');
    }
    text
}

/// Makes one request for the list; returns it if it arrived completely.
async fn attempt(line: &Line<'_>, idle_since: Instant) -> Result<Vec<u8>, Failure> {
    line.guard.begin(&line.place.url);
    let mut response = line.request(Here::default(), idle_since).await?;
    if response.status() != StatusCode::OK {
        let status = response.status();
        return Err(refusal(line.place, status, response.headers()));
    }
    let mut body = Vec::new();
    while let Some(piece) = line.piece(&mut response, 0, None).await? {
        body.extend_from_slice(&piece);
        if body.len() > MAX_LISTING_BYTES {
            return Err(Failure::Final(FetchError::Listing {
                url: line.place.shown.clone(),
                reason: format!("it is longer than {} MiB", MAX_LISTING_BYTES >> 20),
            }));
        }
    }
    Ok(body)
}

/// Whether this may be the path of a file that is needed of a repository: one of those that are known, or weights.
pub(crate) fn may_be_needed(path: &str) -> bool {
    let is_known = BESIDE.contains(&path) || path == INDEX;
    is_known || (is_plain(path) && path.ends_with(ENDING))
}

/// Whether the text is the name of a file in a directory, and nothing more.
fn is_plain(name: &str) -> bool {
    let is_odd = |c: char| c == '/' || c == '\\' || c.is_control();
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with('.')
        && !name.contains(is_odd)
}

fn is_digits(text: &str, count: usize) -> bool {
    text.len() == count
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let siblings: Vec<_> = names
            .iter()
            .map(|name| match name.ends_with(ENDING) {
                true => serde_json::json!({
                    "rfilename": name, "size": 7, "blobId": "b".repeat(40),
                    "lfs": {"sha256": "a".repeat(64), "size": 7, "pointerSize": 134},
                }),
                false => {
                    serde_json::json!({"rfilename": name, "size": 3, "blobId": "b".repeat(40)})
                }
            })
            .collect();
        let answer = serde_json::json!({"sha": "c".repeat(40), "siblings": siblings});
        let read = Listing::read(answer.to_string().as_bytes(), "a/b@main", "http://hub");
        read.unwrap().0
    }

    fn names(files: &[HubFile]) -> Vec<&str> {
        files.iter().map(|file| file.path.as_str()).collect()
    }

    #[test]
    fn only_what_is_read_is_fetched() {
        let all = listing(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            INDEX,
            "onnx/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
        ]);
        let index = all.index().unwrap().unwrap();
        assert_eq!(index.digest.digits(), "b".repeat(40));
        let map = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
        let needed = all.needed(Some(map), 100).unwrap();
        assert_eq!(
            names(&needed),
            [
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                INDEX,
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ]
        );
        assert_eq!(all.sum_bytes(&needed).unwrap(), 4 * 3 + 2 * 7);
        // A single file is served without the index, as it is read.
        let single = listing(&["config.json", INDEX, SINGLE, "other.safetensors"]);
        assert_eq!(single.index().unwrap(), None);
        let needed = single.needed(None, 100).unwrap();
        assert_eq!(names(&needed), ["config.json", SINGLE]);
        let only = listing(&["config.json", "poems.safetensors"]);
        assert_eq!(
            names(&only.needed(None, 100).unwrap()),
            ["config.json", "poems.safetensors"]
        );
    }

    #[test]
    fn a_repository_without_a_model_is_told_with_what_it_has() {
        for (files, expected) in [
            (&["model.safetensors"][..], "config.json is not in it"),
            (
                &["config.json", "model.gguf"],
                "model.gguf is in it, and no safetensors weights",
            ),
            (&["config.json"], "no weights are in it"),
            (
                &["config.json", "a.safetensors", "b.safetensors"],
                "a.safetensors and b.safetensors are",
            ),
        ] {
            let error = listing(files).needed(None, 100).unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains("a/b@main"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_list_cannot_lead_out_of_the_directory() {
        let names = [
            "config.json",
            INDEX,
            "../x.safetensors",
            "/etc/x.safetensors",
        ];
        let hostile = listing(&names);
        for shard in [
            "../x.safetensors",
            "/etc/x.safetensors",
            "a/b.safetensors",
            "x.bin",
            "",
        ] {
            let index = serde_json::json!({"weight_map": {"a": shard}}).to_string();
            let error = hostile.needed(Some(index.as_bytes()), 100).unwrap_err();
            assert!(
                error.to_string().contains("not a file beside it"),
                "{error}"
            );
        }
        let missing = br#"{"weight_map": {"a": "z.safetensors"}}"#;
        let error = hostile.needed(Some(missing), 100).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("z.safetensors, which is not in it"),
            "{error}"
        );
        // Nor is one of those taken as the only weights.
        let hostile = listing(&["config.json", "../x.safetensors"]);
        assert!(hostile.needed(None, 100).is_err());
    }

    #[test]
    fn a_list_that_is_none_is_told() {
        for body in ["", "<html>", "{}", r#"{"sha": "../../etc"}"#] {
            let error = Listing::read(body.as_bytes(), "a/b@main", "http://hub").unwrap_err();
            assert!(matches!(error, FetchError::Listing { .. }), "{error}");
        }
        let body = format!(
            r#"{{"sha": "{}", "siblings": [{{"rfilename": "config.json"}}, {{"rfilename": "model.safetensors"}}]}}"#,
            "c".repeat(40)
        );
        let (bare, _) = Listing::read(body.as_bytes(), "a/b@main", "http://hub").unwrap();
        let error = bare.needed(None, 100).unwrap_err().to_string();
        assert!(
            error.contains("no size and checksum of config.json") && error.contains("blobs=true"),
            "{error}"
        );
    }
}
