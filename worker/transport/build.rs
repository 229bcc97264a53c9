//! Compiles the protobuf definitions with protox, so no protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(
        [
            "hearth/v1/worker.proto",
            "hearth/v1/agent.proto",
            "hearth/v1/group.proto",
            "kubelet/deviceplugin.proto",
        ],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .bytes(".hearth.v1.KvLayer.data")
        .bytes(".hearth.v1.PrefillDone.logits")
        // A message's debug output may end up in a log: see secret.rs.
        .skip_debug([".hearth.v1.Credentials", ".hearth.v1.IdentifyResponse"])
        .compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
