//! Protobuf and tonic: generation, KV transfer, control; mutual TLS.
