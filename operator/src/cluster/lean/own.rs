//! Hearth's own kinds. For an object that this version cannot read, the reason is kept, and other objects are
//! unaffected.

use hearth_controller_core::observed::ScalerView;
use hearth_controller_core::plan_record::model_key_of_raw;
use hearth_crds::{
    HttpFile, HttpSource, HuggingFaceSource, InferenceDeployment, InferenceDeploymentSpec,
    InferenceDeploymentStatus, InferencePlan, InferencePlanSpec, InferencePoolScalerSpec,
    NodeProfileStatus, READER_VERSION, ReadError, SecretRef, read_versioned_value,
};
use kube::api::ObjectMeta;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::slim;
use crate::cluster::cache::{ReadDeployment, Unreadable, UnreadablePlan};
use crate::cluster::packed::Packed;

/// An InferenceDeployment.
#[derive(Clone, Debug)]
pub(crate) struct LeanDeployment {
    pub(crate) metadata: ObjectMeta,
    /// The deployment, or the reason that it cannot be read.
    pub(crate) deployment: Result<InferenceDeployment, String>,
    /// See [`Unreadable::model_key`].
    model_key: Option<String>,
}

/// An InferencePlan.
#[derive(Clone, Debug)]
pub(crate) struct LeanPlan {
    pub(crate) metadata: ObjectMeta,
    /// The plan, or the reason that it cannot be read.
    pub(crate) plan: Result<InferencePlan, UnreadablePlan>,
}

/// A NodeProfile.
#[derive(Clone, Debug)]
pub(crate) struct LeanProfile {
    pub(crate) metadata: ObjectMeta,
    /// The measurement, or the reason that it cannot be read; `None` before the first one.
    pub(crate) status: Result<Option<NodeProfileStatus>, String>,
    /// Whether an earlier version wrote it, into the spec.
    pub(crate) is_in_spec: bool,
}

/// An InferencePoolScaler.
#[derive(Clone, Debug)]
pub(crate) struct LeanScaler {
    pub(crate) metadata: ObjectMeta,
    /// The scaler, or the reason that it cannot be read.
    pub(crate) scaler: Result<ScalerView, String>,
}

impl LeanDeployment {
    /// Converts it to its cached form.
    pub(crate) fn into_read(self) -> ReadDeployment {
        let Self {
            metadata,
            deployment,
            model_key,
        } = self;
        let packed = deployment
            .and_then(|deployment| Packed::new(&deployment).map_err(|error| error.to_string()));
        packed.map_err(|reason| {
            Box::new(Unreadable {
                metadata,
                reason,
                model_key,
            })
        })
    }
}

#[derive(Deserialize)]
struct Raw {
    #[serde(deserialize_with = "slim")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    status: Option<Value>,
}

impl<'de> Deserialize<'de> for LeanDeployment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Raw::deserialize(deserializer)?;
        let metadata = raw.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or_default();
        let model_key = model_key_in(&raw.spec, namespace);
        let deployment = serde_json::from_value::<InferenceDeploymentSpec>(raw.spec).map(|spec| {
            InferenceDeployment {
                metadata: metadata.clone(),
                spec,
                // A status that cannot be read is rewritten.
                status: raw.status.and_then(|status| {
                    serde_json::from_value::<InferenceDeploymentStatus>(status).ok()
                }),
            }
        });
        Ok(Self {
            metadata,
            model_key: model_key.filter(|_| deployment.is_err()),
            deployment: deployment.map_err(|error| error.to_string()),
        })
    }
}

/// Name in the nodes' stores of the model that a spec fetches, read from as little of the spec as possible: whatever
/// else is new or wrong there, the model is in use.
fn model_key_in(spec: &Value, namespace: &str) -> Option<String> {
    let source = spec.pointer("/model/source")?;
    let text = |field: &str| Some(source.pointer(field)?.as_str()?.to_owned());
    if source.get("http").is_none() {
        let hub = HuggingFaceSource {
            repo: text("/huggingFace/repo")?,
            revision: text("/huggingFace/revision"),
            token_secret_ref: text("/huggingFace/tokenSecretRef/name")
                .map(|name| SecretRef { name }),
        };
        return Some(hub.store_key(namespace));
    }
    let files = source.pointer("/http/files").and_then(Value::as_array);
    let file = |file: &Value| {
        let text = |field: &str| Some(file.get(field)?.as_str()?.to_owned());
        Some(HttpFile {
            url: text("url")?,
            sha256: text("sha256")?,
            path: text("path"),
        })
    };
    let (url, sha256) = match files {
        Some(_) => (String::new(), String::new()),
        None => (text("/http/url")?, text("/http/sha256")?),
    };
    let source = HttpSource {
        url,
        sha256,
        files: files
            .into_iter()
            .flatten()
            .map(file)
            .collect::<Option<_>>()?,
        secret_ref: text("/http/secretRef/name").map(|name| SecretRef { name }),
    };
    Some(source.store_key(namespace))
}

impl<'de> Deserialize<'de> for LeanPlan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Raw::deserialize(deserializer)?;
        let metadata = raw.metadata;
        let min_version = raw.spec.get("minVersion").and_then(Value::as_u64);
        let model_key = model_key_of_raw(&raw.spec, metadata.annotations.as_ref());
        // A status that cannot be read is treated as missing.
        let status = raw.status.and_then(|it| serde_json::from_value(it).ok());
        let plan = read_versioned_value(raw.spec).map(|spec: InferencePlanSpec| InferencePlan {
            metadata: metadata.clone(),
            spec,
            status,
        });
        let plan = plan.map_err(|error| {
            let why = match error {
                ReadError::TooNew(_) => String::new(),
                ReadError::Malformed(error) => format!(": {error}"),
            };
            let version = min_version.unwrap_or_default();
            UnreadablePlan {
                why: format!(
                    "its minVersion is {version}, this operator reads up to {READER_VERSION}{why}"
                ),
                model_key,
            }
        });
        Ok(Self { metadata, plan })
    }
}

impl<'de> Deserialize<'de> for LeanProfile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Raw::deserialize(deserializer)?;
        let is_blank = raw.spec.as_object().is_none_or(serde_json::Map::is_empty);
        let is_in_spec = raw.status.is_none() && !is_blank;
        let measured = match is_in_spec {
            true => Some(raw.spec),
            false => raw.status,
        };
        let status = measured.map(serde_json::from_value).transpose();
        Ok(Self {
            metadata: raw.metadata,
            status: status.map_err(|error| error.to_string()),
            is_in_spec,
        })
    }
}

impl<'de> Deserialize<'de> for LeanScaler {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Raw::deserialize(deserializer)?;
        let metadata = raw.metadata;
        let scaler = serde_json::from_value::<InferencePoolScalerSpec>(raw.spec);
        let scaler = scaler.map(|spec| ScalerView {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            generation: metadata.generation,
            replicas: spec.replicas,
            // A status that cannot be read is rewritten.
            status: raw
                .status
                .and_then(|status| serde_json::from_value(status).ok()),
        });
        Ok(Self {
            metadata,
            scaler: scaler.map_err(|error| error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deployment_is_read_without_managed_fields() {
        let lean: LeanDeployment = serde_json::from_value(json!({
            "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": "demo", "namespace": "default", "uid": "u", "resourceVersion": "7",
                         "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}]},
            "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
            "status": {"observedGeneration": 3},
        }))
        .unwrap();
        assert_eq!(lean.metadata.managed_fields, None);
        let deployment = lean.deployment.unwrap();
        assert_eq!(deployment.metadata.name.as_deref(), Some("demo"));
        let status = deployment.status.as_ref().unwrap();
        assert_eq!(status.observed_generation, Some(3));
    }

    /// Errors name fields as they were written: deprecated fields are translated only where they take effect.
    #[test]
    fn a_deployment_is_kept_as_it_was_written() {
        let lean: LeanDeployment = serde_json::from_value(json!({
            "metadata": {"name": "demo", "uid": "u"},
            "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}, "decode": {"maxReplicas": 4}},
        }))
        .unwrap();
        let spec = lean.deployment.unwrap().spec;
        assert_eq!(spec.decode.max_replicas, Some(4));
        assert_eq!(spec.decode.scaling, None);
    }

    #[test]
    fn a_deployment_of_another_version_is_a_reason_and_no_failure() {
        let lean: LeanDeployment = serde_json::from_value(json!({
            "metadata": {"name": "demo", "uid": "u"},
            "spec": {"fromTheFuture": 1, "model": {"source": {"builtin": {"name": "hearth-demo"}}}},
        }))
        .unwrap();
        let reason = lean.deployment.unwrap_err();
        assert!(reason.contains("fromTheFuture"), "{reason}");
        assert_eq!(lean.metadata.uid.as_deref(), Some("u"));
    }

    #[test]
    fn a_plan_for_newer_readers_is_a_reason_also_where_it_could_be_read() {
        let spec = serde_json::to_value(hearth_controller_core::testing::samples::plan()).unwrap();
        let read = |change: &dyn Fn(&mut Value)| {
            let mut spec = spec.clone();
            change(&mut spec);
            let plan = json!({"metadata": {"name": "demo-1", "uid": "p"}, "spec": spec});
            serde_json::from_value::<LeanPlan>(plan).unwrap().plan
        };
        assert!(read(&|spec| spec["fromTheFuture"] = json!(1)).is_ok());
        assert!(read(&|spec| spec["minVersion"] = json!(READER_VERSION)).is_ok());
        let newer = read(&|spec| spec["minVersion"] = json!(READER_VERSION + 1)).unwrap_err();
        let (asked, most) = (READER_VERSION + 1, READER_VERSION);
        assert_eq!(
            newer.why,
            format!("its minVersion is {asked}, this operator reads up to {most}")
        );
        let other = read(&|spec| spec["strategy"] = json!("Swarm")).unwrap_err();
        assert!(
            other.why.contains("minVersion is 0") && other.why.contains("Swarm"),
            "{other:?}"
        );
    }

    #[test]
    fn what_cannot_be_read_still_names_its_model() {
        let sha256 = "a".repeat(64);
        let source = HttpSource {
            url: "https://nas/m.tar".to_owned(),
            sha256: sha256.clone(),
            secret_ref: Some(SecretRef {
                name: "nas".to_owned(),
            }),
            ..HttpSource::default()
        };
        let lean: LeanDeployment = serde_json::from_value(json!({
            "metadata": {"name": "demo", "namespace": "team", "uid": "u"},
            "spec": {"model": {"fromTheFuture": 1, "source": {"http": {"url": source.url, "sha256": sha256,
                "secretRef": {"name": "nas", "key": "token"}, "mirrors": []}}}},
        }))
        .unwrap();
        let unreadable = lean.into_read().unwrap_err();
        assert_eq!(unreadable.model_key, Some(source.store_key("team")));
        let listed = HttpSource {
            files: vec![HttpFile {
                url: "https://nas/m/config.json".to_owned(),
                sha256: sha256.clone(),
                path: None,
            }],
            ..HttpSource::default()
        };
        let lean: LeanDeployment = serde_json::from_value(json!({
            "metadata": {"name": "demo", "namespace": "team", "uid": "u"},
            "spec": {"model": {"fromTheFuture": 1, "source": {"http": {
                "files": [{"url": "https://nas/m/config.json", "sha256": sha256, "mirrors": []}]}}}},
        }))
        .unwrap();
        let unreadable = lean.into_read().unwrap_err();
        assert_eq!(unreadable.model_key, Some(listed.store_key("team")));
        let hub = HuggingFaceSource {
            repo: "a/b".to_owned(),
            revision: None,
            token_secret_ref: Some(SecretRef {
                name: "hub".to_owned(),
            }),
        };
        let lean: LeanDeployment = serde_json::from_value(json!({
            "metadata": {"name": "demo", "namespace": "team", "uid": "u"},
            "spec": {"model": {"fromTheFuture": 1, "source": {"huggingFace": {"repo": "a/b",
                "tokenSecretRef": {"name": "hub"}}}}},
        }))
        .unwrap();
        let unreadable = lean.into_read().unwrap_err();
        assert_eq!(unreadable.model_key, Some(hub.store_key("team")));
        let plan: LeanPlan = serde_json::from_value(json!({
            "metadata": {"name": "demo-1", "uid": "p", "annotations": {"hearth.dev/model-key": "0123"}},
            "spec": {"minVersion": 99},
        }))
        .unwrap();
        assert_eq!(plan.plan.unwrap_err().model_key.as_deref(), Some("0123"));
    }
}
