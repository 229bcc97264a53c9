//! Protobuf and tonic: generation, KV transfer, control.

#![forbid(unsafe_code)]

/// Messages and services of `hearth.v1`, generated from `proto/hearth/v1/worker.proto`.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("hearth.v1");
}
