//! API types of `hearth.dev/v1alpha1`: [`InferenceDeploymentSpec`], [`InferencePlanSpec`], [`NodeProfileStatus`].
//!
//! Without features the crate is plain serde types: that is what the planner and the workers use.
//! Feature `kube` adds the custom resources themselves (`InferenceDeployment`, `InferencePlan`, `NodeProfile`,
//! `InferencePoolScaler`), their schemas with CEL rules, the generated YAML ([`crd_yaml`]) and [`parse_deployment`],
//! which checks a file in process by the same rules that the API server runs at admission.
//!
//! Architecture invariant: nothing here reads a file, a clock or the network.

#![forbid(unsafe_code)]
// KubeSchema copies each type into a function body, where `pub` is unreachable.
#![cfg_attr(feature = "kube", allow(unreachable_pub))]
// Several printed columns have the same type.
#![cfg_attr(feature = "kube", allow(clippy::duplicated_attributes))]

mod capability;
mod convert;
mod decode;
mod deployment;
mod error;
mod execution;
mod facts;
mod model;
mod place;
mod plan;
mod plan_group;
mod plan_peers;
mod plan_record;
mod plan_ring;
mod plan_weights;
mod pod_template;
mod process;
mod profile;
mod quantity;
mod reader;
mod routes;
mod scaler;
mod scaling;
mod status;
mod store;
mod translate;
mod url;
mod worker_report;

#[cfg(feature = "kube")]
mod bounds;
#[cfg(feature = "kube")]
mod crd;
#[cfg(feature = "kube")]
mod meant;
#[cfg(feature = "kube")]
mod offer;
#[cfg(feature = "kube")]
mod parse;
#[cfg(feature = "kube")]
mod rules;
#[cfg(feature = "kube")]
mod structural;

pub use capability::{BUILTIN_MODELS, KV_TYPES_SAYS, NOT_INTERLEAVED_SAYS, Target, unsupported};
pub use convert::Conversion;
pub use decode::*;
pub use deployment::*;
pub use error::{FieldError, sentence};
pub use execution::*;
pub use facts::{KvShape, LayerKinds, ModelFacts, ModuleBytes};
pub use model::*;
pub use place::{PLACE_DIRECTORY, TLS_DIRECTORY, tls_name};
pub use plan::*;
pub use plan_group::*;
pub use plan_peers::*;
pub use plan_record::*;
pub use plan_ring::*;
pub use plan_weights::*;
pub use pod_template::*;
pub use process::{
    END_MARGIN, HUNG_AFTER, LAST_WORDS, LastError, MAX_FAILED_STARTS, Restarts, how_it_ended,
};
pub use profile::*;
pub use quantity::{DurationText, MemoryQuantity, QuantityError, format_bytes, format_remaining};
pub use reader::{
    PEERS_VERSION, READER_VERSION, RING_VERSION, ReadError, STREAMED_DENSE_VERSION, read_versioned,
    read_versioned_value,
};
pub use routes::{Route, Routes};
pub use scaler::*;
pub use scaling::{ScalingMode, ScalingSpec};
pub use status::*;
pub use store::{
    HUB_ENDPOINT, HUB_REVISION, NodeFetch, NodeModel, NodeStore, PartialModel, STORE_KEY_DIGITS,
    StoredModel, files_revision, files_store_key, hub_store_key, is_for_all, store_key,
};
pub use url::shown_url;
pub use worker_report::{StreamedPrompts, WorkerReport};

#[cfg(feature = "kube")]
pub use crd::{crd_yaml, crd_yaml_files, crds};
#[cfg(feature = "kube")]
pub use parse::{ParseError, parse_deployment, parse_deployment_for, validate_deployment};

/// API group of all resources.
pub const GROUP: &str = "hearth.dev";
/// The only served version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` as written in a file.
pub const API_VERSION: &str = "hearth.dev/v1alpha1";
