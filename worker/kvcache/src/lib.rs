//! Logical KV blocks: typestate, reference counts and the prefix index.
