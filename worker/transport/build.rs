//! Compiles the protobuf by protox: no protoc is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(
        ["hearth/v1/worker.proto", "hearth/v1/agent.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .bytes(".hearth.v1.KvLayer.data")
        .bytes(".hearth.v1.PrefillDone.logits")
        .compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
