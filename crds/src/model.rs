//! The model part of a deployment: the source of its files and how it is offered.

use serde::{Deserialize, Serialize};

use crate::error::counted;
#[cfg(feature = "kube")]
use crate::rules;
use crate::url::shown_url;

/// The model and how it is offered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSpec {
    /// Source of the model's files: exactly one of builtin, huggingFace, persistentVolumeClaim, hostPath, http.
    pub source: ModelSource,
    /// The model's name in the OpenAI API. By default the name that the source gives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 128)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][A-Za-z0-9._:/-]*$')").message("write a name of letters, digits and ._:/- that begins with a letter or digit"))
    )]
    pub served_name: Option<String>,
    /// Maximum number of tokens of prompt and answer together. By default what the model was trained for, at most
    /// 8192.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self >= 16 && self <= 16777216").message("write a context of 16 to 16777216 tokens, or leave it out for the model's own, at most 8192"))
    )]
    pub context_length: Option<u32>,
    /// Native keeps the weights as the checkpoint has them. W8A8 and W4A8 would requantise on loading and are refused: this
    /// engine has neither yet.
    #[serde(default)]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NATIVE_WEIGHTS).message(rules::NATIVE_WEIGHTS_SAYS)))]
    pub quantization: Quantization,
    /// Precision of activations in products with weights. Auto rounds them to BF16 on GPUs, and is F32 on CPUs. F32
    /// rounds none, which costs a GPU up to three times the work. BF16 rounds on GPUs; CPUs compute no rounded products
    /// and stay at F32, and the plan says so. Routers of experts are F32 with each. By default Auto.
    #[serde(default, skip_serializing_if = "Activations::is_auto")]
    pub activations: Activations,
    /// LoRA adapters that requests may name. Refused: this engine runs none yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::NO_ITEMS).message(rules::NO_ADAPTERS_SAYS)))]
    pub adapters: Vec<AdapterSpec>,
}

/// Source of files: exactly one of the members.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(
        validation = Rule::new("[has(self.builtin), has(self.huggingFace), has(self.persistentVolumeClaim), has(self.hostPath), has(self.http)].exists_one(chosen, chosen)")
            .message("write exactly one of builtin, huggingFace, persistentVolumeClaim, hostPath, http; for the model that comes with Hearth: builtin: {name: hearth-demo}")
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSource {
    /// A model that comes with Hearth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builtin: Option<BuiltinSource>,
    /// A repository of the Hugging Face Hub, or of its mirror, fetched by the nodes' agents: of its files only those that
    /// serving needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugging_face: Option<HuggingFaceSource>,
    /// A directory on a persistent volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimSource>,
    /// A directory of the node's own file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathSource>,
    /// An archive or files at URLs, fetched by the nodes' agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSource>,
}

/// A model that comes with Hearth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuiltinSource {
    /// Its name: hearth-demo.
    #[cfg_attr(feature = "kube", schemars(length(max = 64)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::BUILTIN_NAME).message(rules::BUILTIN_NAME_SAYS))
    )]
    pub name: String,
}

/// A repository of the Hugging Face Hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HuggingFaceSource {
    /// The repository as owner/name, such as Qwen/Qwen3-30B-A3B.
    #[cfg_attr(feature = "kube", schemars(length(max = 193)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$')").message("write the repository as owner/name, such as Qwen/Qwen3-30B-A3B, without https:// and without a revision"))
    )]
    pub repo: String,
    /// A branch, tag or commit. By default main. The commit that it stands for is chosen when the model is first fetched;
    /// what a node has is used again without asking the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 128)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][A-Za-z0-9._/-]*$') && !self.contains('..')").message("write a branch, tag or commit, such as main"))
    )]
    pub revision: Option<String>,
    /// The Secret with the token for a gated or private repository, in the deployment's namespace, under the key `token`.
    /// Its type is Opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<SecretRef>,
}

/// A directory on a persistent volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PersistentVolumeClaimSource {
    /// The claim's name, in the deployment's namespace.
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub claim_name: String,
    /// The model's directory inside the volume. By default its root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^([^/]|$)') && !self.matches('(^|/)[.][.](/|$)')").message("write a path inside the volume, without a leading / and without .."))
    )]
    pub path: Option<String>,
}

/// A directory of the node's own file system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostPathSource {
    /// The absolute path of the directory with config.json and the weights.
    #[cfg_attr(feature = "kube", schemars(length(max = 1024)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::ABSOLUTE).message("write the absolute path of the model's directory, such as /models/qwen3-30b-a3b, without .."))
    )]
    pub path: String,
}

/// An archive, or a model's files, behind URLs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(validation = Rule::new(rules::ARCHIVE_XOR_FILES).message(rules::ARCHIVE_XOR_FILES_SAYS))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpSource {
    /// An http or https URL of an archive; none with files.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 2048)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::ARCHIVE_URL).message(rules::ARCHIVE_URL_SAYS))
    )]
    pub url: String,
    /// The archive's SHA-256.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 64)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::SHA256).message(rules::SHA256_SAYS)))]
    pub sha256: String,
    /// The model's files, instead of an archive. What serving needs of them is fetched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 200)))]
    pub files: Vec<HttpFile>,
    /// The Secret with the credentials for the URL, in the deployment's namespace: username and password, or token.
    /// Its type is Opaque or kubernetes.io/basic-auth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
}

/// Longest path of a listed file.
const MAX_FILE_PATH_BYTES: usize = 255;

/// One of a model's files behind a URL.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpFile {
    /// An http or https URL.
    #[cfg_attr(feature = "kube", schemars(length(max = 2048)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::FILE_URL).message(rules::FILE_URL_SAYS),
            validation = Rule::new(rules::FILE_URL_HAS_NO_SPACE).message(rules::FILE_URL_SAYS)
        )
    )]
    pub url: String,
    /// The file's SHA-256.
    #[cfg_attr(feature = "kube", schemars(length(max = 64)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::SHA256).message(rules::SHA256_SAYS)))]
    pub sha256: String,
    /// Its path in the model's directory. By default the URL's last part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 255)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::FILE_PATH).message(rules::FILE_PATH_SAYS)))]
    pub path: Option<String>,
}

impl HttpFile {
    /// Its path in the model's directory.
    pub fn path(&self) -> &str {
        let of_url = || {
            let path = self.url.split(['?', '#']).next().unwrap_or_default();
            path.rsplit('/').next().unwrap_or_default()
        };
        self.path.as_deref().unwrap_or_else(of_url)
    }

    /// Whether that is a path within the directory, of letters, digits and ._-.
    pub fn has_plain_path(&self) -> bool {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_name = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.bytes().all(is_plain)
        };
        self.path().len() <= MAX_FILE_PATH_BYTES && self.path().split('/').all(is_name)
    }
}

impl HttpSource {
    /// Where it is, as it may be shown: the archive's URL without secrets, or the directory of the first file.
    pub fn shown(&self) -> String {
        let Some(first) = self.files.first() else {
            return shown_url(&self.url);
        };
        shown_files(&first.url, self.files.len())
    }
}

/// Where a list of `count` files is, as it may be shown: the directory of the first one's URL, without secrets.
pub fn shown_files(first: &str, count: usize) -> String {
    let url = shown_url(first);
    let directory = url
        .rsplit_once('/')
        .map_or(&*url, |(directory, _)| directory);
    format!("{directory}/ ({})", counted(count, "file"))
}

/// A LoRA adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdapterSpec {
    /// Name by which requests select it.
    #[cfg_attr(feature = "kube", schemars(length(max = 128)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][A-Za-z0-9._:/-]*$')").message("write a name of letters, digits and ._:/- that begins with a letter or digit"))
    )]
    pub name: String,
    /// Source of its files.
    pub source: ModelSource,
}

/// The name of a Secret in the deployment's namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretRef {
    /// The Secret's name.
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub name: String,
}

/// Conversion of the weights on loading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Quantization {
    /// None: the weights stay as the checkpoint has them.
    #[default]
    Native,
    /// 8-bit weights, 8-bit activations.
    W8A8,
    /// 4-bit weights, 8-bit activations.
    W4A8,
}

/// Precision of activations in products with weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum Activations {
    /// What each device does best: BF16 on GPUs, F32 on CPUs.
    #[default]
    Auto,
    /// Not rounded.
    F32,
    /// Rounded to bfloat16 on GPUs.
    BF16,
}

impl Activations {
    /// Whether each device decides.
    pub fn is_auto(&self) -> bool {
        *self == Self::Auto
    }
}

impl ModelSource {
    /// Returns the name that the source gives its model: a builtin's name, a repository, the last part of a path, an
    /// archive's name without its extension, or the directory of the first file.
    pub fn default_name(&self) -> String {
        let last = |path: &str| {
            let part = path
                .trim_end_matches('/')
                .rsplit('/')
                .next()
                .unwrap_or_default();
            if part.is_empty() {
                "model".to_owned()
            } else {
                part.to_owned()
            }
        };
        if let Some(builtin) = &self.builtin {
            builtin.name.clone()
        } else if let Some(hub) = &self.hugging_face {
            hub.repo.clone()
        } else if let Some(host) = &self.host_path {
            last(&host.path)
        } else if let Some(claim) = &self.persistent_volume_claim {
            claim
                .path
                .as_deref()
                .map_or_else(|| claim.claim_name.clone(), last)
        } else if let Some(http) = &self.http {
            if let Some(first) = http.files.first() {
                let url = shown_url(&first.url);
                let directory = url.split_once("://").map_or(&*url, |(_, place)| place);
                let directory = directory.rsplit_once('/').map(|(directory, _)| directory);
                // Without the server's name.
                let path = directory.and_then(|directory| directory.split_once('/'));
                return last(path.map_or("", |(_, path)| path));
            }
            // The part behind the path may be a credential.
            let path = http.url.split(['?', '#']).next().unwrap_or_default();
            let name = last(path);
            let endings = [".tar", ".tar.gz", ".tgz", ".tar.zst"];
            let stem = endings.iter().find_map(|ending| name.strip_suffix(ending));
            stem.filter(|stem| !stem.is_empty())
                .map_or_else(|| name.clone(), str::to_owned)
        } else {
            "model".to_owned()
        }
    }

    /// Describes the source in a few words, such as `builtin hearth-demo` or `hostPath /models/qwen3`.
    pub fn describe(&self) -> String {
        if let Some(builtin) = &self.builtin {
            format!("builtin {}", builtin.name)
        } else if let Some(hub) = &self.hugging_face {
            format!(
                "huggingFace {}@{}",
                hub.repo,
                hub.revision.as_deref().unwrap_or("main")
            )
        } else if let Some(host) = &self.host_path {
            format!("hostPath {}", host.path)
        } else if let Some(claim) = &self.persistent_volume_claim {
            format!(
                "persistentVolumeClaim {}/{}",
                claim.claim_name,
                claim.path.as_deref().unwrap_or("")
            )
        } else if let Some(http) = &self.http {
            format!("http {}", http.shown())
        } else {
            "none".to_owned()
        }
    }
}

impl ModelSpec {
    /// Returns the spec in a form that may be copied to other objects: its URLs without secrets.
    #[must_use]
    pub fn shown(&self) -> Self {
        let mut spec = self.clone();
        spec.source.hide();
        spec.adapters
            .iter_mut()
            .for_each(|adapter| adapter.source.hide());
        spec
    }
}

impl ModelSource {
    fn hide(&mut self) {
        if let Some(http) = &mut self.http {
            http.url = shown_url(&http.url);
            for file in &mut http.files {
                file.url = shown_url(&file.url);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_names_its_model_without_its_ending() {
        for (url, name) in [
            ("https://nas.lan/models/qwen3-30b.tar", "qwen3-30b"),
            ("https://nas.lan/qwen3.tar.gz?X-Signature=a/b#part", "qwen3"),
            ("http://nas/a/poems.tgz", "poems"),
            ("http://nas/poems.v2.tar.zst", "poems.v2"),
            ("http://nas/download", "download"),
            ("http://nas/a/.tar", ".tar"),
        ] {
            let source = ModelSource {
                http: Some(HttpSource {
                    url: url.to_owned(),
                    sha256: "a".repeat(64),
                    ..HttpSource::default()
                }),
                ..ModelSource::default()
            };
            assert_eq!(source.default_name(), name, "{url}");
        }
    }

    #[test]
    fn files_name_their_model_by_the_directory_of_the_first() {
        for (url, name, shown) in [
            (
                "https://ann:pw@nas.lan/models/qwen3/config.json?sig=x/y",
                "qwen3",
                "https://nas.lan/models/qwen3/ (1 file)",
            ),
            ("http://nas/config.json", "model", "http://nas/ (1 file)"),
        ] {
            let mut source = ModelSource {
                http: Some(HttpSource {
                    files: vec![HttpFile {
                        url: url.to_owned(),
                        ..HttpFile::default()
                    }],
                    ..HttpSource::default()
                }),
                ..ModelSource::default()
            };
            assert_eq!(source.default_name(), name, "{url}");
            assert_eq!(source.describe(), format!("http {shown}"));
            source.hide();
            let text = serde_json::to_string(&source).unwrap();
            assert!(!text.contains("pw") && !text.contains("sig"), "{text}");
            assert_eq!(source.http.unwrap().files[0].path(), "config.json");
        }
    }
}
