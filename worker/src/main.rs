//! The `hearth-worker` command.
fn main() {}
